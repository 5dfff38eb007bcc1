"""A predictor of active neurons: two small matrices with ReLU between them, for one layer.

`scores(x) = second @ max(first @ x, 0) + bias`, with `first` `[rank, hidden]` and `second` `[neurons, rank]`; a neuron
is predicted to be active where its score is not below the layer's threshold (DejaVu, section 4; PowerInfer, section
5.1, whose files hold just these two matrices). A predictor of layer `i` with look-ahead `k` is given the input of the
feed-forward block of layer `i - k`, so that there is time to fetch what it names (DynamicInfer).

Both matrices are runs of rows as in a pack, so that any kernels multiply with them (`Kernels.logits`).
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
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
Weights = Literal["f16", "q8", "q4s"]
"""How a predictor's matrices are kept: two bytes a weight, or blocks of 34 or 18 bytes for 32 of them."""
Given = Literal["normed", "residual"]
"""What a predictor is given: a feed-forward block's input after its norm, or the hidden states before it."""


def row_bytes(columns: int, weights: Weights) -> int:
    """Bytes of a row of so many values as it is kept."""
    return 2 * columns if weights == "f16" else columns // GROUP * GROUP_BYTES[weights]


@dataclass(frozen=True, eq=False)
class PredictorMatrix:
    """`stored` has the rows as they are kept: float16 `[count, columns]`, or blocks of Q8_0 or Q4_0 uint8
    `[count, bytes]`."""

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
        """From float32 `[count, columns]`.

        Raises:
            ModelError: if a value is not finite, or blocks are asked for rows that are no multiple of 32.
        """
        if not np.isfinite(values).all():
            raise ModelError("a predictor's weights are infinite or NaN; train it again")
        count, columns = values.shape
        if weights == "f16":
            return cls(np.clip(values, -65504, 65504).astype(np.float16), columns)
        if columns % GROUP:
            raise ModelError(f"a predictor's rows of {columns} values are no multiple of {GROUP}; keep it in f16")
        return cls(quantise_groups(weights, values).reshape(count, -1), columns)

    @property
    def weights(self) -> Weights:
        """How they are kept."""
        if self.stored.dtype != np.uint8:
            return "f16"
        return "q4s" if self.stored.shape[1:] == (row_bytes(self.columns, "q4s"),) else "q8"

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.stored)

    def values(self) -> F32:
        """As float32 `[count, columns]`."""
        weights = self.weights
        if weights == "f16":
            return self.stored.astype(np.float32)
        return dequantise_groups(weights, self.stored.reshape(self.count, -1, GROUP_BYTES[weights]).view(np.uint8))

    @cached_property
    def run(self) -> RunLayout:
        """The rows as a run of a pack: f16 becomes f32, and the last unit is filled with zeros."""
        format: Format = "f32" if self.weights == "f16" else self.weights
        units = -(-self.count // FFN_UNIT)
        return RunLayout("row", "record", (Part("row", format, "row"),), FFN_UNIT, self.columns, units)

    @cached_property
    def data(self) -> U8:
        """The bytes of `run`."""
        kept = self.stored.astype(np.float32) if self.weights == "f16" else self.stored
        more = self.run.units * FFN_UNIT - self.count
        padded = np.pad(kept, ((0, more), (0, 0))) if more else kept
        return np.ascontiguousarray(padded).view(np.uint8).reshape(-1)

    def times(self, x: F32, kernels: Kernels | None) -> F32:
        """`x` `[tokens, columns]` times every row: `[tokens, count]`."""
        x = np.ascontiguousarray(x, np.float32)
        found = rows(self.run, self.data, "row", x) if kernels is None else kernels.logits(self.run, self.data, x)
        return found[:, : self.count]


@dataclass(frozen=True, eq=False)
class Predictor:
    """The predictor of one layer. See the module's docstring; `bias` is `[neurons]` float32 or None."""

    layer: int
    first: PredictorMatrix
    second: PredictorMatrix
    threshold: float = 0.0
    ahead: int = 0
    given: Given = "normed"
    bias: F32 | None = field(default=None)

    def __post_init__(self) -> None:
        if self.second.columns != self.first.count:
            raise ModelError(
                f"the predictor of layer {self.layer} has matrices of rank {self.first.count} and {self.second.columns}"
            )
        if self.bias is not None and self.bias.shape != (self.neurons,):
            raise ModelError(f"the predictor of layer {self.layer} has {len(self.bias)} biases for {self.neurons}")
        if not 0 <= self.ahead <= self.layer or not np.isfinite(self.threshold):
            raise ModelError(f"the predictor of layer {self.layer} looks {self.ahead} layers ahead, above the first")

    @property
    def rank(self) -> int:
        """Values between the two matrices."""
        return self.first.count

    @property
    def neurons(self) -> int:
        """Of its layer."""
        return self.second.count

    @property
    def nbytes(self) -> int:
        """Bytes on disk, and what counts against the limit of a model's predictors."""
        return self.first.stored.nbytes + self.second.stored.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory once it is used: f16 is held as f32."""
        kept = 0 if self.bias is None else self.bias.nbytes
        return kept + sum(matrix.run.units * matrix.run.unit_bytes for matrix in (self.first, self.second))

    def of(self, first: int, last: int) -> "Predictor":
        """The same for the neurons `[first, last)` alone."""
        second = PredictorMatrix(self.second.stored[first:last], self.second.columns)
        return replace(self, second=second, bias=None if self.bias is None else self.bias[first:last])

    def scores(self, x: F32, kernels: Kernels | None = None) -> F32:
        """`[tokens, neurons]` for `x` `[tokens, hidden]`; without kernels by the reference."""
        between = np.maximum(self.first.times(x, kernels), np.float32(0))
        found = self.second.times(between, kernels)
        return found if self.bias is None else found + self.bias

    def active(self, x: F32, kernels: Kernels | None = None) -> npt.NDArray[np.bool_]:
        """`[tokens, neurons]`: which are predicted to be active for each token."""
        return np.asarray(self.scores(x, kernels) >= np.float32(self.threshold))

    def predict(self, x: F32, kernels: Kernels | None = None) -> I32:
        """The neurons that any of the tokens needs, in order: `[active]` int32."""
        return np.flatnonzero(self.active(x, kernels).any(axis=0)).astype(np.int32)
