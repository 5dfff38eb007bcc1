"""Reading of attention heads whose vectors a tensor stores in another order than a pack does."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.sources.base import Bytes, Source, SourceTensor
from tpi.sources.elements import Element, decode

_FLOATS = Element("F32", 1, 4)
_ZEROS = -1


@dataclass(frozen=True)
class HeadOrder:
    """The vectors that a pack takes from each head of a tensor, in the pack's order."""

    size: int  # vectors of a head in the tensor
    order: tuple[int, ...]  # indices of the vectors taken; -1 is a vector of zeros

    @classmethod
    def from_interleaved(cls, size: int) -> "HeadOrder":
        """Return the order for interleaved rotary pairs: the first vector of every pair, then every second vector."""
        return cls(size, (*range(0, size, 2), *range(1, size, 2)))

    def in_groups(self, group: int) -> "HeadOrder | None":
        """Return the same order in terms of groups of `group` consecutive vectors.

        Return None if the order splits a group.
        """
        chunks = [self.order[at : at + group] for at in range(0, len(self.order), group)]
        if self.size % group or any(_first(chunk, group) is None for chunk in chunks):
            return None
        return HeadOrder(self.size // group, tuple(_first(chunk, group) or 0 for chunk in chunks))

    def reorder(self, values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Reorder the vectors of each head: uint8 `[heads * size, bytes]` to `[heads * len(order), bytes]`."""
        heads = values.reshape(-1, self.size, values.shape[-1])
        taken = heads[:, self.order]
        taken[:, [number == _ZEROS for number in self.order]] = 0
        return taken.reshape(-1, values.shape[-1])


def _first(chunk: tuple[int, ...], group: int) -> int | None:
    """Return the index of the group whose vectors `chunk` lists in order.

    Return -1 if all of them are zeros, and None if `chunk` is not one whole group.
    """
    if set(chunk) == {_ZEROS} and len(chunk) == group:
        return _ZEROS
    begin = chunk[0]
    whole = begin % group == 0 and chunk == tuple(range(begin, begin + group))
    return begin // group if whole else None


def read_rows(source: Source, tensor: SourceTensor, order: HeadOrder, heads: range) -> Bytes:
    """Read the rows of these heads of a tensor, uint8 `[rows, bytes]`, in the pack's order.

    Raises:
        ModelError: if the file cannot be read.
    """
    rows = (heads.start * order.size, heads.stop * order.size)
    return order.reorder(source.read(tensor, rows, (0, tensor.columns)))


def read_columns(source: Source, tensor: SourceTensor, order: HeadOrder, heads: range) -> tuple[Bytes, Element]:
    """Read the columns of these heads of a tensor, uint8 `[rows, bytes]`, in the pack's order.

    Also return their coding: the source's own, or F32 if the heads do not consist of whole groups.

    Raises:
        ModelError: if the file cannot be read.
    """
    element, first, last = tensor.element, heads.start * order.size, heads.stop * order.size
    begin, end = first // element.group * element.group, -(-last // element.group) * element.group
    raw = source.read(tensor, (0, tensor.rows), (begin, end))
    of_groups = order.in_groups(element.group)
    if of_groups is None:
        values = np.ascontiguousarray(decode(element, raw)[:, first - begin : last - begin])
        raw, element, of_groups = values.view(np.uint8), _FLOATS, order
    groups = raw.reshape(tensor.rows, -1, element.group_bytes).swapaxes(0, 1)
    wide = of_groups.reorder(np.ascontiguousarray(groups).reshape(groups.shape[0], -1))
    picked = wide.reshape(-1, tensor.rows, element.group_bytes).swapaxes(0, 1)
    return np.ascontiguousarray(picked).reshape(tensor.rows, -1), element


def read_transposed(source: Source, tensor: SourceTensor, order: HeadOrder, heads: range) -> tuple[Bytes, Element]:
    """Read the rows of these heads from a tensor that stores each head transposed, one head after the other.

    Return uint8 `[rows, bytes]` in the pack's order, and its coding, which is F32.

    Raises:
        ModelError: if the file cannot be read.
    """
    each = tensor.shape[-2]
    raw = source.read(tensor, (heads.start * each, heads.stop * each), (0, tensor.columns))
    values = decode(tensor.element, raw).reshape(len(heads), each, tensor.columns).swapaxes(1, 2)
    rows = np.ascontiguousarray(values).reshape(-1, each).view(np.uint8)
    return order.reorder(rows), _FLOATS
