"""Reading of rectangles of packed codes and of scales from the tensors that hold them."""

from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.base import Source, SourceTensor
from tpi.sources.elements import Element, decode
from tpi.sources.fp8 import E4M3

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Range = tuple[int, int]

_BYTE = Element("U8", 1, 1)
_RUN = 32  # codes of any number of bits fill whole words of 4 bytes
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # places of 8 successive codes in a word, in AWQ's kernels for matrix products


@dataclass(frozen=True)
class Packed:
    """A matrix of unsigned codes of `bits` bits, packed densely along one axis, the low bits of the first byte first.

    Attributes:
        tensor: a matrix of bytes or of int32 words. More dimensions count as rows.
        bits: 1 to 8.
        along: the axis of the tensor along which codes are packed: bytes of a row, or words of a column.
        awq: True if every 8 codes of a row are in AWQ's order.
        plus: number that is added to each code, modulo 2^bits.
    """

    tensor: SourceTensor
    bits: int
    along: Literal["row", "column"] = "row"
    awq: bool = False
    plus: int = 0

    def read(self, source: Source, rows: Range, columns: Range) -> U8:
        """Return the codes of a rectangle, uint8 `[rows, columns]`.

        Raises:
            ModelError: if the file cannot be read.
        """
        if self.along == "row":
            codes = self._unpacked(source, rows, columns)
        else:
            codes = self._unpacked(source, columns, rows).T
        return (codes + np.uint8(self.plus)) & np.uint8((1 << self.bits) - 1) if self.plus else codes

    def _unpacked(self, source: Source, lines: Range, codes: Range) -> U8:
        """Return the codes `codes` of the lines `lines`, as `[lines, codes]`. A line is a row or a column."""
        first = codes[0] // _RUN
        run = self.bits * _RUN // 8
        begin, end = first * run, -(-codes[1] // _RUN) * run
        raw = self._bytes(source, lines, begin, end)
        whole = np.pad(raw, ((0, 0), (0, -raw.shape[1] % run)))
        found = _unpack(whole, self.bits)
        if self.awq:
            found = found.reshape(len(found), -1, 8)[:, :, _AWQ].reshape(len(found), -1)
        return found[:, codes[0] - first * _RUN : codes[1] - first * _RUN]

    def _bytes(self, source: Source, lines: Range, begin: int, end: int) -> U8:
        """Return bytes `[begin, end)` of each line of `lines`, as `[lines, bytes]`.

        There are fewer bytes if the lines end before `end`.
        """
        tensor = self.tensor
        if self.along == "row":
            width = tensor.row_bytes
            flat = replace(tensor, shape=(tensor.rows, width), element=_BYTE)
            return source.read(flat, lines, (min(begin, width), min(end, width)))
        words = (min(begin // 4, tensor.rows), min(end // 4, tensor.rows))
        raw = source.read(tensor, words, lines).reshape(words[1] - words[0], lines[1] - lines[0], 4)
        return np.ascontiguousarray(raw.swapaxes(0, 1)).reshape(lines[1] - lines[0], -1)


@dataclass(frozen=True)
class Bytes8:
    """A matrix of int8 numbers; each is read as an unsigned code, which is `offset` larger."""

    tensor: SourceTensor
    offset: int

    def read(self, source: Source, rows: Range, columns: Range) -> U8:
        """Return the codes of a rectangle, uint8 `[rows, columns]`.

        Raises:
            ModelError: if the file cannot be read, or a number has more bits than the configuration says.
        """
        numbers = source.read(self.tensor, rows, columns).view(np.int8).astype(np.int16) + self.offset
        if numbers.size and (numbers.min() < 0 or numbers.max() >= 2 * self.offset):
            raise ModelError(
                f"{source.label}: tensor {self.tensor.name} has numbers of more bits than the configuration says; "
                "download the model again"
            )
        return numbers.astype(np.uint8)


@dataclass(frozen=True)
class Factors:
    """A matrix of scales or minima, one for each group of a row. If `transposed`, the tensor is `[groups, rows]`.

    A tensor of a single value holds for all groups.
    """

    tensor: SourceTensor
    transposed: bool = False

    def read(self, source: Source, rows: Range, groups: Range) -> F32:
        """Return the factors of a rectangle, float32 `[rows, groups]`.

        Raises:
            ModelError: if the file cannot be read, or the numbers are of a type that is not supported.
        """
        tensor = self.tensor
        if tensor.rows * tensor.columns == 1:
            return np.broadcast_to(self._read(source, (0, 1), (0, 1)), (rows[1] - rows[0], groups[1] - groups[0]))
        return self._read(source, groups, rows).T if self.transposed else self._read(source, rows, groups)

    def _read(self, source: Source, rows: Range, columns: Range) -> F32:
        raw = source.read(self.tensor, rows, columns)
        if self.tensor.element.name in ("F8_E4M3", "U8"):
            return E4M3[raw]
        return decode(self.tensor.element, raw)


def read_all(source: Source, tensor: SourceTensor) -> npt.NDArray[np.int64]:
    """Return the values of a small tensor of integers, `[values]`.

    Raises:
        ModelError: if it has more than 2^24 values or no integers, or the file cannot be read.
    """
    kinds = {"I32": "<i4", "I64": "<i8"}
    if tensor.element.name not in kinds or tensor.rows * tensor.columns > 1 << 24:
        raise ModelError(f"{source.label}: tensor {tensor.name} is not a list of integers; download the model again")
    raw = source.read(tensor, (0, tensor.rows), (0, tensor.columns))
    return raw.view(kinds[tensor.element.name]).astype(np.int64).reshape(-1)


def _unpack(raw: U8, bits: int) -> U8:
    """Unpack codes of `bits` bits each, from `[lines, bytes]` to `[lines, bytes * 8 / bits]`."""
    if bits == 8:
        return raw
    if bits in (1, 2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return cast(U8, (raw[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(raw), -1))
    each = np.unpackbits(raw, axis=-1, bitorder="little").reshape(len(raw), -1, bits)
    return cast(U8, (each << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8))
