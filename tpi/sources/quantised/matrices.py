"""Quantised matrices as one tensor each: codes with scales and zero points, NVFP4 and MXFP4."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.base import Bytes, Source, SourceTensor
from tpi.sources.elements import Element
from tpi.sources.quantised import groups
from tpi.sources.quantised.fields import Bytes8, Factors, Packed, Range

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
MXFP4 = Element("MXFP4", 32, 17)


class Joined(Protocol):
    """A matrix that is made from several tensors of the file. `tensor` describes it as a whole."""

    @property
    def tensor(self) -> SourceTensor:
        """The name, the shape and the coding of the matrix."""

    def read(self, source: Source, rows: Range, columns: Range) -> Bytes:
        """Return the bytes of a rectangle, uint8 `[rows, bytes]`, in the coding of `tensor`."""


@dataclass(frozen=True)
class Integers:
    """A matrix of integer codes of 1 to 8 bits.

    Attributes:
        tensor: the matrix, in groups of 32 codes (`tpi.sources.quantised.groups`) or dequantised.
        codes: the codes; of the transposed matrix if `transposed`.
        scales: the scale of each group of a row.
        zeros: the zero of each group of a row, transposed if `transposed`; None: 2^(bits - 1).
        minima: the minimum of each group, instead of zeros.
        group: columns that share a scale.
        order: the group of each column, `[columns]`; None if groups are runs of columns.
    """

    tensor: SourceTensor
    codes: Packed | Bytes8
    scales: Factors
    zeros: Packed | Bytes8 | None
    minima: Factors | None
    bits: int
    group: int
    transposed: bool = False
    order: npt.NDArray[np.int32] | None = None

    def read(self, source: Source, rows: Range, columns: Range) -> Bytes:
        """Return the bytes of a rectangle, uint8 `[rows, bytes]`: groups of 40 bytes, or float32.

        Raises:
            ModelError: if the file cannot be read, or zero points are not those of symmetric groups.
        """
        codes = _oriented(self.codes, source, rows, columns, self.transposed)
        of_columns = np.arange(*columns) // self.group if self.order is None else self.order[slice(*columns)]
        first, last = (int(of_columns.min()), int(of_columns.max()) + 1) if of_columns.size else (0, 0)
        scales = self.scales.read(source, rows, (first, last))
        offsets = self._offsets(source, rows, (first, last))
        if self.tensor.element.quantised:
            chosen = of_columns[:: groups.GROUP] - first
            return groups.join_groups(scales[:, chosen], offsets[:, chosen], np.ascontiguousarray(codes))
        chosen, kind = of_columns - first, self.tensor.element.name
        values = groups.value_of(kind, codes, scales[:, chosen], offsets[:, chosen])
        return np.ascontiguousarray(values, "<f4").view(np.uint8)

    def _offsets(self, source: Source, rows: Range, of_groups: Range) -> F32:
        """Return the zeros or minima of some groups, float32 `[rows, groups]`."""
        if self.minima:
            return self.minima.read(source, rows, of_groups)
        middle = 1 << (self.bits - 1)
        if self.zeros is None:
            return np.full((rows[1] - rows[0], of_groups[1] - of_groups[0]), middle, np.float32)
        zeros = _oriented(self.zeros, source, rows, of_groups, self.transposed)
        if self.tensor.element.name.startswith("INT") and (zeros != middle).any():
            raise ModelError(
                f"{source.label}: {self.tensor.name} has zero points, but the configuration calls it symmetric; "
                "download the model again"
            )
        return zeros.astype(np.float32)


@dataclass(frozen=True)
class Nvfp4:
    """A matrix of e2m1 codes: 16 share an e4m3 scale, and all share a float32 one.

    If `divided`, scales are divided by the shared scale instead of multiplied by it. `shared` has one value, or one for
    each matrix of a stack; None: 1.
    """

    tensor: SourceTensor
    codes: Packed
    scales: Factors
    shared: F32 | None
    divided: bool = False

    def read(self, source: Source, rows: Range, columns: Range) -> Bytes:
        """Return the bytes of a rectangle, uint8 `[rows, bytes]`: groups of 40 bytes, or float32.

        Raises:
            ModelError: if the file cannot be read.
        """
        codes = self.codes.read(source, rows, columns)
        first = columns[0] // 16
        scales = self.scales.read(source, rows, (first, -(-columns[1] // 16)))
        if self.shared is not None:
            stacked = np.arange(*rows) // self.tensor.shape[-2] if self.shared.size > 1 else np.zeros(1, np.intp)
            shared = self.shared[stacked][:, None]
            scales = scales / shared if self.divided else scales * shared
        if self.tensor.element.quantised:
            return groups.join_groups(scales[:, ::2], scales[:, 1::2], np.ascontiguousarray(codes))
        values = groups.E2M1[codes] * scales[:, np.arange(*columns) // 16 - first]
        return np.ascontiguousarray(values, "<f4").view(np.uint8)


@dataclass(frozen=True)
class Mxfp4:
    """A matrix of e2m1 codes, of which 32 share an e8m0 scale, as blocks of GGUF's MXFP4.

    A block is the scale, then 16 bytes, of which byte j has values j and j + 16 (`tpi.pack.groups`).
    """

    tensor: SourceTensor
    codes: Packed
    scales: SourceTensor

    def read(self, source: Source, rows: Range, columns: Range) -> Bytes:
        """Return the bytes of a rectangle, uint8 `[rows, bytes]`; `columns` must consist of whole groups of 32.

        Raises:
            ModelError: if the file cannot be read.
        """
        scales = source.read(self.scales, rows, (columns[0] // 32, columns[1] // 32))
        codes = self.codes.read(source, rows, columns).reshape(*scales.shape, 2, 16)
        blocks = np.concatenate([scales[..., None], codes[:, :, 0] | codes[:, :, 1] << np.uint8(4)], axis=-1)
        return blocks.reshape(len(blocks), -1)


@dataclass(frozen=True)
class Plain:
    """A matrix or a stack of matrices that is not quantised."""

    tensor: SourceTensor

    def read(self, source: Source, rows: Range, columns: Range) -> Bytes:
        """Return the bytes of a rectangle, uint8 `[rows, bytes]`.

        Raises:
            ModelError: if the file cannot be read.
        """
        return source.read(self.tensor, rows, columns)


@dataclass(frozen=True)
class Slice:
    """One matrix of a stack, under a name of its own."""

    tensor: SourceTensor
    stack: Joined
    number: int

    def read(self, source: Source, rows: Range, columns: Range) -> Bytes:
        """Return the bytes of a rectangle, uint8 `[rows, bytes]`.

        Raises:
            ModelError: if the file cannot be read.
        """
        first = self.number * self.tensor.shape[-2]
        return self.stack.read(source, (first + rows[0], first + rows[1]), columns)


def slices(stack: Joined, names: list[str]) -> list[Joined]:
    """Return the matrices of a stack of three dimensions, one for each name."""
    whole = stack.tensor
    return [Slice(replace(whole, name=name, shape=whole.shape[1:]), stack, at) for at, name in enumerate(names)]


def element_of(kind: str, columns: int, group: int, reordered: bool = False) -> Element:
    """Return the coding of a matrix of this kind, whose rows have `columns` values and scales for each `group`.

    The coding keeps the codes if a pack has a format for them, each group of 32 columns has one scale, and columns are
    not `reordered`. Otherwise it is float32.
    """
    kept = kind in groups.FORMATS and columns % groups.GROUP == 0 and not reordered
    if kept and (group % groups.GROUP == 0 or group >= columns):
        return Element(kind, groups.GROUP, groups.GROUP_BYTES)
    return Element(kind + groups.DEQUANTISED, 1, 4)


def _oriented(field: Packed | Bytes8, source: Source, rows: Range, columns: Range, transposed: bool) -> U8:
    return field.read(source, columns, rows).T if transposed else field.read(source, rows, columns)
