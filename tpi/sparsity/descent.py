"""Where a predictor's training begins, and its steps: reduced-rank regression, and Adam (Kingma and Ba, 2015)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Active = npt.NDArray[np.bool_]
_RIDGE = 1e-2  # of the mean square of the input
_RARE = 1e-4  # a neuron is taken to be active at least as often, at most one minus that
_SLOPE = 4.0  # of a logit by a probability at one half


def initial(x: F32, active: Active, rank: int, random: np.random.Generator) -> tuple[F32, F32, F32]:
    """`first` `[rank, hidden]`, `second` `[neurons, rank]` and bias: the best linear predictor of half the rank.

    Each direction is there with both its signs, and a little noise, so that the two can part.
    """
    often = np.clip(active.mean(axis=0), _RARE, 1 - _RARE)
    wide = x.astype(np.float64)
    gram = wide.T @ wide
    gram += np.eye(len(gram)) * (_RIDGE * np.trace(gram) / len(gram) + 1e-12)
    lower = np.linalg.cholesky(gram)
    whitened = np.linalg.solve(lower, wide.T @ (active - often))
    half = min((rank + 1) // 2, len(gram))
    directions = np.linalg.eigh(whitened @ whitened.T)[1][:, -half:]
    inward = np.linalg.solve(lower.T, directions).T * np.sqrt(len(x))
    outward = (directions.T @ whitened).T * (_SLOPE / np.sqrt(len(x)))
    first = _widened(np.concatenate([inward, -inward]), rank, random)
    second = _widened(np.concatenate([outward, -outward], axis=1).T, rank, random).T
    return first, np.ascontiguousarray(second), np.log(often / (1 - often)).astype(np.float32)


def _widened(rows: npt.NDArray[np.float64], rank: int, random: np.random.Generator) -> F32:
    """`rank` rows: what there is, then noise of a hundredth of its size, which is on all."""
    found = random.standard_normal((rank, rows.shape[1])) * (0.01 * np.sqrt(np.mean(np.square(rows))))
    found[: len(rows)] += rows[:rank]
    return np.asarray(found, np.float32)


class Adam:
    """Adam over arrays that are changed in place."""

    def __init__(self, values: Sequence[F32], first: float = 0.9, second: float = 0.999) -> None:
        """`first` and `second` are the decays of the moments."""
        self._values, self._decays, self._steps = values, (first, second), 0
        self._means = [np.zeros_like(value) for value in values]
        self._squares = [np.zeros_like(value) for value in values]

    def step(self, gradients: Sequence[F32], rate: float) -> None:
        """One step against `gradients`."""
        self._steps += 1
        one, two = self._decays
        size = np.float32(rate / (1 - one**self._steps))
        correction = np.float32(1 / (1 - two**self._steps))
        for value, gradient, mean, square in zip(self._values, gradients, self._means, self._squares, strict=True):
            mean += np.float32(1 - one) * (gradient - mean)
            square += np.float32(1 - two) * (gradient * gradient - square)
            value -= size * mean / (np.sqrt(square * correction) + np.float32(1e-8))
