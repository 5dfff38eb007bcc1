"""Access to a matrix of the source as the vectors that units are made of. It is read in slabs, never as a whole."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.families.base import Ref
from tpi.pack.builder.transcode import transcode
from tpi.pack.layout import GROUP, GROUP_BYTES, Axis
from tpi.sources.base import Source, SourceTensor, find, read_vector
from tpi.sources.elements import Element, decode
from tpi.sources.heads import HeadOrder, read_columns, read_rows, read_transposed

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
_T = TypeVar("_T", np.uint8, np.float32)


@dataclass(frozen=True)
class Slab:
    """Consecutive vectors of a matrix, encoded as in the source.

    `raw` is `[vectors, bytes]` for rows and `[hidden, bytes]` for columns. A slab may hold more vectors than were asked
    for, because it starts and ends at the boundary of a group or a head. Vectors past the end of the matrix are zeros.
    """

    axis: Axis
    element: Element
    raw: Bytes
    first: int  # number of the first vector in `raw`
    count: int  # number of vectors in `raw`

    def values(self, first: int, last: int) -> F32:
        """Decode vectors `[first, last)` to float32 `[last - first, hidden]`."""
        start, stop = first - self.first, min(last - self.first, self.count)
        if self.axis == "row":
            found = decode(self.element, self.raw[start:stop])
        else:
            low = start // self.element.group
            high = -(-stop // self.element.group)
            size = self.element.group_bytes
            values = decode(self.element, np.ascontiguousarray(self.raw[:, low * size : high * size]))
            found = values[:, start - low * self.element.group : stop - low * self.element.group].T
        return _padded(found, last - first)

    def groups(self, first: int, last: int) -> Bytes:
        """Return vectors `[first, last)` as groups of the format `element.nearest`, as `[last - first, bytes]`.

        For columns the result is `[hidden, bytes]`, and the range must consist of whole groups of 32.
        """
        start, stop = first - self.first, min(last - self.first, self.count)
        if self.axis == "row":
            return _padded(transcode(self.element, self.raw[start:stop]), last - first)
        block, each = max(self.element.group, GROUP), GROUP_BYTES[self.element.nearest]
        low, high = start // block, -(-stop // block)
        raw = self.raw[:, self.element.row_bytes(low * block) : self.element.row_bytes(high * block)]
        begin = (start - low * block) // GROUP * each
        found = transcode(self.element, raw)[:, begin : begin + -(-(stop - start) // GROUP) * each]
        return np.pad(found, ((0, 0), (0, (last - first) // GROUP * each - found.shape[1])))


@dataclass(frozen=True)
class Matrix:
    """A matrix of `vectors` vectors (rows or columns) of equal length. It may be some rows of a fused tensor."""

    source: Source
    tensor: SourceTensor
    axis: Axis
    vectors: int
    first_row: int  # first row of the matrix in the tensor
    last_row: int  # end of its rows in the tensor, exclusive
    transposed: bool  # the tensor holds the matrix transposed
    stride: tuple[int, int] = (0, 1)  # (index of its first vector in the tensor, distance between its vectors)
    heads: HeadOrder | None = None  # which vectors of each head in the tensor belong to the matrix

    @property
    def element(self) -> Element:
        """Encoding of the values in the source."""
        return self.tensor.element

    @property
    def vector_bytes(self) -> int:
        """Size in bytes of one vector in the source, rounded up."""
        rows = self.last_row - self.first_row
        return -(-rows * self.tensor.row_bytes // max(self.vectors, 1))

    def load(self, first: int, last: int) -> Slab:
        """Read a slab with vectors `[first, last)`; vectors past the end of the matrix are left out."""
        last = min(last, self.vectors)
        if self.heads:
            return self._load_heads(self.heads, first, last)
        at, every = self.stride
        if _by_rows(self.axis, self.transposed):
            rows = (self.first_row + first * every, self.first_row + last * every)
            raw = self.source.read(self.tensor, rows, (0, self.tensor.columns))[at::every]
            return Slab("row", self.element, raw, first, last - first)
        group, size = self.element.group, self.element.group_bytes
        first = first // group * group
        last = min(-(-last // group) * group, self.vectors)
        raw = self.source.read(self.tensor, (self.first_row, self.last_row), (first * every, last * every))
        if every > 1:
            raw = raw.reshape(len(raw), -1, size)[:, at::every].reshape(len(raw), -1)
        return Slab("column", self.element, raw, first, last - first)

    def _load_heads(self, order: HeadOrder, first: int, last: int) -> Slab:
        """Read the vectors of all heads that overlap `[first, last)`. `order` is the pack's order inside a head."""
        each = len(order.order)
        heads, element = range(first // each, -(-last // each)), self.element
        if self.transposed:
            raw, element = read_transposed(self.source, self.tensor, order, heads)
        elif self.axis == "row":
            raw = read_rows(self.source, self.tensor, order, heads)
        else:
            raw, element = read_columns(self.source, self.tensor, order, heads)
        return Slab(self.axis, element, raw, heads.start * each, len(heads) * each)


def matrix(source: Source, ref: Ref, axis: Axis, vectors: int, hidden: int) -> Matrix:
    """Find the matrix that `ref` names and check its shape: `vectors` vectors of length `hidden`.

    Raises:
        ModelError: if the tensor is missing or has another shape; the message names it.
    """
    tensor = find(source, ref.tensor)
    by_rows, every = _by_rows(axis, ref.transposed), ref.stride[1]
    rows, columns = (vectors * every, hidden) if by_rows else (hidden, vectors * every)
    if every > 1 and not by_rows and tensor.element.quantised:
        raise ModelError(
            f"{source.label}: tensor {ref.tensor} interleaves the columns of several matrices, which cannot be "
            "separated because they share scales; use a file in f32, f16 or bf16"
        )
    first, last = ref.rows or (0, tensor.rows)
    if ref.heads:
        return _of_heads(source, tensor, ref, ref.heads, axis, vectors, hidden)
    fused = ref.rows is not None and len(tensor.shape) in (2, 3) and last <= tensor.rows
    if not (fused or tensor.shape == (rows, columns)) or (last - first, tensor.columns) != (rows, columns):
        raise ModelError(
            f"{source.label}: tensor {ref.tensor} has shape {list(tensor.shape)}; its configuration asks for "
            f"{[last, columns] if ref.rows else [rows, columns]}"
        )
    return Matrix(source, tensor, axis, vectors, first, last, ref.transposed, ref.stride)


def _by_rows(axis: Axis, transposed: bool) -> bool:
    return (axis == "row") is not transposed


def _of_heads(
    source: Source, tensor: SourceTensor, ref: Ref, order: HeadOrder, axis: Axis, vectors: int, hidden: int
) -> Matrix:
    heads = vectors // len(order.order)
    wanted = (heads * order.size, hidden) if axis == "row" else (hidden, heads * order.size)
    if ref.transposed:
        wanted = (heads * hidden, order.size)
    if (tensor.rows, tensor.columns) != wanted or (ref.transposed and tensor.shape[:-1] != (heads, hidden)):
        raise ModelError(
            f"{source.label}: tensor {ref.tensor} has shape {list(tensor.shape)}; its configuration asks for "
            f"{list(wanted)}"
        )
    return Matrix(source, tensor, axis, vectors, 0, tensor.rows, ref.transposed, heads=order)


def vector(source: Source, ref: Ref, flat: bool = False) -> F32:
    """Read the vector that `ref` names as float32 and add `ref.add`. With `flat`, also accept a matrix, row by row.

    Raises:
        ModelError: if the tensor is missing or is not a vector; the message names it.
    """
    values, tensor = read_vector(source, ref.tensor, flat, ref.rows), find(source, ref.tensor)
    width = tensor.columns if len(tensor.shape) > 1 else 1
    values = values[ref.stride[0] :: ref.stride[1]]
    if ref.heads and len(values) % (ref.heads.size * width) == 0:  # otherwise the caller reports the wrong length
        values = ref.heads.reorder(values.reshape(-1, width).view(np.uint8)).view(np.float32).reshape(-1)
    return values + np.float32(ref.add) if ref.add else values


def _padded(rows: npt.NDArray[_T], count: int) -> npt.NDArray[_T]:
    if len(rows) == count:
        return rows
    padded = np.zeros((count, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
