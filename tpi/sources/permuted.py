"""A source whose tensors have rows or columns in another order: the same function, with its neurons renumbered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.base import CHUNK_BYTES, Bytes, Source, SourceTensor

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Permutation:
    """`order[new] = old`, int32, of a tensor's rows or of its columns; a vector has columns."""

    axis: Literal["row", "column"]
    order: I32


class PermutedSource:
    """A `Source` in which the tensors named in `permutations` are in their orders."""

    def __init__(self, source: Source, permutations: Mapping[str, Permutation]) -> None:
        """Raises ModelError if columns of values that share a scale are to be permuted."""
        self.label, self.tensors = source.label, source.tensors
        self._source, self._permutations = source, permutations
        for name, permutation in permutations.items():
            if permutation.axis == "column" and source.tensors[name].element.group > 1:
                raise ModelError(
                    f"{self.label}: the columns of {name} share scales, so its neurons cannot be renumbered; take the "
                    "model in 16 or 32 bits"
                )

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """See `Source.read`."""
        permutation = self._permutations.get(tensor.name)
        if permutation is None:
            return self._source.read(tensor, rows, columns)
        wanted = permutation.order[slice(*(rows if permutation.axis == "row" else columns))]
        if permutation.axis == "row":
            return np.concatenate([self._source.read(tensor, (row, row + 1), columns) for row in wanted.tolist()])
        return self._columns(tensor, rows, wanted)

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _columns(self, tensor: SourceTensor, rows: tuple[int, int], wanted: I32) -> Bytes:
        """Whole rows are read, a few at a time, and the wanted columns taken."""
        size = tensor.element.group_bytes
        out = np.empty((rows[1] - rows[0], len(wanted) * size), np.uint8)
        step = max(1, CHUNK_BYTES // tensor.row_bytes)
        for first in range(0, len(out), step):
            last = min(first + step, len(out))
            raw = self._source.read(tensor, (rows[0] + first, rows[0] + last), (0, tensor.columns))
            values = raw.reshape(last - first, tensor.columns, size)
            out[first:last] = values[:, wanted].reshape(last - first, -1)
        return out
