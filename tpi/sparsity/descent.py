"""Initial weights of a predictor by reduced-rank regression, and the Adam optimizer (Kingma and Ba, 2015)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.sparsity.examples import LayerExamples

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
_RIDGE = 1e-2  # ridge regularisation, as a share of the mean square of the input
_RARE = 1e-4  # activation frequencies are clipped to [_RARE, 1 - _RARE]
_SLOPE = 4.0  # derivative of the logit by the probability, at probability 1/2


def initial_weights(examples: LayerExamples, rank: int, random: np.random.Generator) -> tuple[F32, F32, F32]:
    """Return the initial weights of a predictor: the best linear predictor of half the rank.

    The result is `first` `[rank, hidden]`, `second` `[neurons, rank]` and the bias `[neurons]`, all float32. Each
    direction occurs with both signs, since ReLU passes only one. A little noise lets the two copies diverge.
    """
    often, gram, cross = _moments(examples)
    lower = np.linalg.cholesky(gram)
    halfway = np.linalg.solve(lower, (cross @ cross.T).astype(np.float64))
    whitened = np.linalg.solve(lower, halfway.T)
    half = min((rank + 1) // 2, len(gram))
    directions = np.linalg.solve(lower.T, np.linalg.eigh(whitened)[1][:, -half:]).T
    inward = directions * np.sqrt(len(examples))
    outward = (directions.astype(np.float32) @ cross) * np.float32(_SLOPE / np.sqrt(len(examples)))
    first = _widened(np.concatenate([inward, -inward]), rank, random)
    second = _widened(np.concatenate([outward, -outward]), rank, random).T
    return first, np.ascontiguousarray(second), np.log(often / (1 - often)).astype(np.float32)


def _moments(examples: LayerExamples) -> tuple[F32, F64, F32]:
    """Return the frequencies and the second moments that the regression needs.

    With the inputs x and the activity a (0 or 1), the result is: the frequency f of each neuron, clipped, `[neurons]`;
    the regularised Gram matrix of the inputs, `x.T @ x`, `[hidden, hidden]`; and `x.T @ (a - f)`, `[hidden, neurons]`.
    """
    counts, total = np.zeros(examples.neurons), np.zeros(examples.hidden)
    gram, cross = np.zeros((examples.hidden,) * 2), np.zeros((examples.hidden, examples.neurons), np.float32)
    for x, active in examples.pieces():
        counts += active.sum(axis=0)
        total += x.sum(axis=0, dtype=np.float64)
        gram += x.T @ x
        cross += x.T @ active.astype(np.float32)
    often = np.clip(counts / len(examples), _RARE, 1 - _RARE).astype(np.float32)
    for row, weight in zip(cross, total.astype(np.float32), strict=True):
        row -= weight * often
    gram += np.eye(len(gram)) * (_RIDGE * np.trace(gram) / len(gram) + 1e-12)
    return often, gram, cross


def _widened(rows: npt.NDArray[np.floating[Any]], rank: int, random: np.random.Generator) -> F32:
    """Return the first `rank` of `rows`, with rows of zeros added if there are fewer, plus noise.

    The noise is a hundredth of the RMS of `rows`.
    """
    found = random.standard_normal((rank, rows.shape[1])) * (0.01 * np.sqrt(np.mean(np.square(rows))))
    found[: len(rows)] += rows[:rank]
    return np.asarray(found, np.float32)


class Adam:
    """The Adam optimizer; it updates the arrays in place."""

    def __init__(self, values: Sequence[F32], first: float = 0.9, second: float = 0.999) -> None:
        """Create an optimizer of `values`; `first` and `second` are the decay rates of the two moments."""
        self._values, self._decays, self._steps = values, (first, second), 0
        self._means = [np.zeros_like(value) for value in values]
        self._squares = [np.zeros_like(value) for value in values]

    def step(self, gradients: Sequence[F32], rate: float) -> None:
        """Update the values by one step of learning rate `rate` against `gradients`."""
        self._steps += 1
        one, two = self._decays
        size = np.float32(rate / (1 - one**self._steps))
        correction = np.float32(1 / (1 - two**self._steps))
        for value, gradient, mean, square in zip(self._values, gradients, self._means, self._squares, strict=True):
            mean += np.float32(1 - one) * (gradient - mean)
            square += np.float32(1 - two) * (gradient * gradient - square)
            value -= size * mean / (np.sqrt(square * correction) + np.float32(1e-8))
