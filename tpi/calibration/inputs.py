"""The mean square of each input of a block's matrices: it says how much errors of the weights for that input matter."""

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from tpi.calibration.floats import FloatReader
from tpi.pack.builder.plan import BlockRecipe
from tpi.pack.builder.writer import Importance
from tpi.pack.layout import GROUP, Axis, RunLayout, RunName

F32 = npt.NDArray[np.float32]
Key = tuple[RunName, int, str]  # run, piece, part
PRIOR = 8.0  # tokens that the prior of an expert's inputs counts as
_LEAST = np.float32(1e-20)  # the least importance, for inputs that were always 0; the mean importance is 1


class Inputs:
    """Observer of the products of one block (`tpi.kernels.arithmetic.observed`)."""

    def __init__(self, normed: F32) -> None:
        """Create an observer of a block whose normed input is `normed`, float32 `[tokens, hidden]`."""
        self.piece = 0  # the piece that is computed
        self._prior = _mean_squares(normed)
        self._means: dict[Key, list[F32]] = defaultdict(list)
        self._tokens: dict[Key, int] = {}

    def __call__(self, run: RunLayout, part: str, x: F32) -> None:
        """Record the input `x` of a part, `[tokens, inputs]`.

        All segments of a block have the same input for their row parts, which is recorded once. For its column parts,
        each segment has inputs of its own.
        """
        key = (run.name, self.piece, part)
        if run.part(part).axis == "column" or key not in self._means:
            self._means[key].append(_mean_squares(x))
            self._tokens[key] = len(x)

    def importance(self, block: BlockRecipe, reader: FloatReader) -> Importance:
        """Return the importance of the inputs of each matrix that is quantised by weighted errors.

        The importance is the mean square of an input, divided by the mean over all inputs. A matrix is left out if its
        inputs are not finite or all 0, or if it is a column part of an expert that no token chose.
        """
        found: dict[Key, F32] = {}
        for run in block.runs:
            for number, part in enumerate(run.layout.parts):
                for piece in reader.quantised_pieces(run, number):
                    key = (run.layout.name, piece, part.name)
                    means = np.concatenate(self._means[key]) if key in self._means else None
                    if block.kind == "experts":
                        means = self._with_prior(means, self._tokens.get(key, 0), part.axis)
                    if means is not None and np.isfinite(means).all() and means.any():
                        found[key] = np.asarray(np.maximum(means / means.mean(), _LEAST), np.float32)
        return found

    def _with_prior(self, means: F32 | None, tokens: int, axis: Axis) -> F32 | None:
        """Return the mean squares of an expert's inputs over its `tokens` and `PRIOR` further tokens.

        A mean over few tokens is uncertain. The squares of the further tokens are those of the block's input for rows,
        and the mean of each group of 32 inputs for columns.
        """
        if axis == "row":
            prior = self._prior
        elif means is not None:
            prior = np.repeat(means.reshape(-1, GROUP).mean(axis=1), GROUP)
        else:
            return None
        measured = np.zeros_like(prior) if means is None else means
        return np.asarray((measured * np.float32(tokens) + prior * np.float32(PRIOR)) / np.float32(tokens + PRIOR))


def _mean_squares(x: F32) -> F32:
    """Return the mean of the squares of each column of `x`, `[tokens, inputs]`; zeros without tokens."""
    return np.asarray(np.einsum("ti,ti->i", x, x) / np.float32(max(len(x), 1)), np.float32)
