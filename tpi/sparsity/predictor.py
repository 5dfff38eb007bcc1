"""A predictor of active neurons: two small matrices with ReLU between them, for one layer.

`scores(x) = second @ max(first @ x, 0) + bias`, with `first` `[rank, hidden]` and `second` `[neurons, rank]`; a neuron
is predicted to be active if its score is not below the layer's threshold (DejaVu, section 4; PowerInfer, section
5.1). PowerInfer's files hold these two matrices. A predictor of layer `i` with look-ahead `k` reads the input of the
feed-forward block of layer `i - k`. This leaves time to fetch the predicted neurons (DynamicInfer).

Both matrices are laid out as runs of rows as in a pack, so that `Kernels.logits` can multiply by them.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from tpi.config import Format
from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.kernels.arithmetic import rows
from tpi.pack.groups import dequantise_groups, quantise_groups
from tpi.pack.layout import GROUP, GROUP_BYTES, Part, RunLayout
from tpi.partition import FFN_UNIT

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Weights = Literal["f16", "q8", "q4s"]
"""Format of a predictor's matrices: f16 takes 2 bytes a weight; q8 and q4s take 34 and 18 bytes for 32 weights."""
InputKind = Literal["normed", "residual"]
"""Input of a predictor: the feed-forward block's input after its norm, or the hidden states before that norm."""


def row_bytes(columns: int, weights: Weights) -> int:
    """Return the bytes of a stored row of `columns` values in the format `weights`."""
    return 2 * columns if weights == "f16" else columns // GROUP * GROUP_BYTES[weights]


@dataclass(frozen=True, eq=False)
class PredictorMatrix:
    """One matrix of a predictor.

    `stored` is float16 `[count, columns]`, or uint8 `[count, bytes]` in blocks of Q8_0 or Q4_0.
    """

    stored: npt.NDArray[np.generic]
    columns: int

    def __post_init__(self) -> None:
        width, weights = self.columns, self.weights
        length = width if weights == "f16" else row_bytes(width, weights)
        if self.stored.shape[1:] != (length,) or (weights != "f16" and width % GROUP):
            shape = list(self.stored.shape)
            raise ModelError(f"a predictor's rows of {width} values in {weights} cannot have the shape {shape}")

    @classmethod
    def of(cls, values: F32, weights: Weights) -> "PredictorMatrix":
        """Create a matrix in the format `weights` from float32 `[count, columns]`.

        Raises:
            ModelError: if a value is not finite, or if the format has blocks and `columns` is not a multiple of 32.
        """
        if not np.isfinite(values).all():
            raise ModelError("a predictor's weights are infinite or NaN; train it again")
        count, columns = values.shape
        if weights == "f16":
            return cls(np.clip(values, -65504, 65504).astype(np.float16), columns)
        if columns % GROUP:
            raise ModelError(f"a predictor's rows have {columns} values, not a multiple of {GROUP}; store it in f16")
        return cls(quantise_groups(weights, values).reshape(count, -1), columns)

    @property
    def weights(self) -> Weights:
        """Format of the matrix."""
        if self.stored.dtype != np.uint8:
            return "f16"
        return "q4s" if self.stored.shape[1:] == (row_bytes(self.columns, "q4s"),) else "q8"

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.stored)

    def values(self) -> F32:
        """Return the matrix as float32 `[count, columns]`."""
        weights = self.weights
        if weights == "f16":
            return self.stored.astype(np.float32)
        return dequantise_groups(weights, self.stored.reshape(self.count, -1, GROUP_BYTES[weights]).view(np.uint8))

    @cached_property
    def run(self) -> RunLayout:
        """Layout of the rows as a run of a pack: f16 becomes f32, and the last unit is padded with zeros."""
        format: Format = "f32" if self.weights == "f16" else self.weights
        units = -(-self.count // FFN_UNIT)
        return RunLayout("row", "record", (Part("row", format, "row"),), FFN_UNIT, self.columns, units)

    @cached_property
    def data(self) -> U8:
        """Bytes of the rows in the layout `run`."""
        kept = self.stored.astype(np.float32) if self.weights == "f16" else self.stored
        more = self.run.units * FFN_UNIT - self.count
        padded = np.pad(kept, ((0, more), (0, 0))) if more else kept
        return np.ascontiguousarray(padded).view(np.uint8).reshape(-1)

    def multiply(self, x: F32, kernels: Kernels | None) -> F32:
        """Return the products of `x` `[tokens, columns]` with every row, `[tokens, count]`.

        Without kernels, the reference implementation is used.
        """
        x = np.ascontiguousarray(x, np.float32)
        found = rows(self.run, self.data, "row", x) if kernels is None else kernels.logits(self.run, self.data, x)
        return found[:, : self.count]


@dataclass(frozen=True, eq=False)
class Predictor:
    """The predictor of one layer, as described at the top of this module; `bias` is float32 `[neurons]` or None."""

    layer: int
    first: PredictorMatrix
    second: PredictorMatrix
    threshold: float = 0.0
    ahead: int = 0
    input_kind: InputKind = "normed"
    bias: F32 | None = field(default=None)

    def __post_init__(self) -> None:
        if self.second.columns != self.first.count:
            raise ModelError(
                f"the predictor of layer {self.layer} has matrices of rank {self.first.count} and {self.second.columns}"
            )
        if self.bias is not None and self.bias.shape != (self.neurons,):
            raise ModelError(f"the predictor of layer {self.layer} has {len(self.bias)} biases for {self.neurons}")
        if not 0 <= self.ahead <= self.layer or not np.isfinite(self.threshold):
            raise ModelError(
                f"the predictor of layer {self.layer} has the look-ahead {self.ahead} and the threshold "
                f"{self.threshold}; the look-ahead must be from 0 to {self.layer}, and the threshold finite"
            )

    @property
    def rank(self) -> int:
        """Number of values between the two matrices."""
        return self.first.count

    @property
    def neurons(self) -> int:
        """Number of neurons that the predictor covers."""
        return self.second.count

    @property
    def nbytes(self) -> int:
        """Bytes on disk, which count towards the size limit of a model's predictors."""
        return self.first.stored.nbytes + self.second.stored.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory while it is used; f16 matrices are expanded to f32."""
        kept = 0 if self.bias is None else self.bias.nbytes
        return kept + sum(matrix.run.units * matrix.run.unit_bytes for matrix in (self.first, self.second))

    def slice(self, first: int, last: int) -> "Predictor":
        """Return the predictor of the neurons `[first, last)`."""
        second = PredictorMatrix(self.second.stored[first:last], self.second.columns)
        return replace(self, second=second, bias=None if self.bias is None else self.bias[first:last])

    def scores(self, x: F32, kernels: Kernels | None = None) -> F32:
        """Return the scores `[tokens, neurons]` of the inputs `x` `[tokens, hidden]`.

        Without kernels, the reference implementation is used.
        """
        between = np.maximum(self.first.multiply(x, kernels), np.float32(0))
        found = self.second.multiply(between, kernels)
        return found if self.bias is None else found + self.bias

    def active(self, x: F32, kernels: Kernels | None = None) -> npt.NDArray[np.bool_]:
        """Return a mask of the neurons that are predicted to be active for each token: bool `[tokens, neurons]`."""
        return np.asarray(self.scores(x, kernels) >= np.float32(self.threshold))
