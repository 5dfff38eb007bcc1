"""The interface of a source of weights: named tensors, of which any rows and columns can be read alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.elements import Element, decode

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
_Self = TypeVar("_Self", bound="FileSource")  # typing.Self needs Python 3.11

CHUNK_BYTES = 8 << 20  # bytes of whole rows read at a time when a range of columns is requested


@dataclass(frozen=True)
class SourceTensor:
    """The place in a file, shape and coding of a tensor.

    The last entry of `shape` is the number of columns; a vector has one row.
    """

    name: str
    shape: tuple[int, ...]
    element: Element
    path: Path
    offset: int  # in the file, bytes

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last; 1 for a vector."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Number of values in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.element.row_bytes(self.columns)


class Source(Protocol):
    """A model's tensors by name, whose bytes can be read. `label` names the source in messages."""

    label: str
    tensors: Mapping[str, SourceTensor]

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return the bytes of a rectangle of `tensor` as uint8 `[rows, bytes]`.

        `rows` and `columns` are half-open ranges. `columns` must begin and end at a boundary of the element's groups.
        """

    def close(self) -> None:
        """Close all files of the source."""


class FileSource:
    """Tensors in files, read with positioned reads.

    The files are not mapped into memory: if one shrinks, a read raises ModelError, where mmap would raise SIGBUS.
    """

    def __init__(self, label: str, tensors: Mapping[str, SourceTensor]) -> None:
        self.label = label
        self.tensors = tensors
        self._files: dict[Path, int] = {}

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files that reads have opened."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return the bytes of a rectangle of `tensor` as uint8 `[rows, bytes]`.

        Raises:
            ModelError: if the file cannot be read or has become shorter; the message names it.
        """
        start, stop = tensor.element.row_bytes(columns[0]), tensor.element.row_bytes(columns[1])
        out = np.empty((rows[1] - rows[0], stop - start), np.uint8)
        stride = tensor.row_bytes
        base = tensor.offset + rows[0] * stride
        if not out.size:
            return out
        if stop - start == stride:
            self._fill(tensor, base, out)
        elif 4 * (stop - start) < stride and len(out) * stride > CHUNK_BYTES:
            for row in range(len(out)):
                self._fill(tensor, base + row * stride + start, out[row])
        else:
            step = max(1, CHUNK_BYTES // stride)
            for first in range(0, len(out), step):
                chunk = np.empty((min(step, len(out) - first), stride), np.uint8)
                self._fill(tensor, base + first * stride, chunk)
                out[first : first + step] = chunk[:, start:stop]
        return out

    def _fill(self, tensor: SourceTensor, offset: int, out: npt.NDArray[Any]) -> None:
        view = out.data.cast("B")
        try:
            file = self._files.get(tensor.path)
            if file is None:
                file = self._files[tensor.path] = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
            while len(view):
                count = os.preadv(file, [view], offset)
                if not count:
                    raise ModelError(f"{tensor.path} ends inside tensor {tensor.name}; download it again")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise ModelError(f"cannot read {tensor.path}: {error.strerror}") from error


def find(source: Source, name: str) -> SourceTensor:
    """Return the tensor called `name`.

    Raises:
        ModelError: if it is missing; the message names the tensor and the source.
    """
    if name not in source.tensors:
        raise ModelError(f"{source.label} has no tensor {name}; the model is incomplete or of an unknown variant")
    return source.tensors[name]


def read_vector(source: Source, name: str, flat: bool = False, part: tuple[int, int] | None = None) -> F32:
    """Return a one-dimensional tensor as float32 `[values]`.

    With `flat`, also accept a tensor of more dimensions, and return its values row by row. `part` is the half-open
    range of values to return, or of rows if there are more dimensions; None: all.

    Raises:
        ModelError: if the tensor is missing, has more than one row (without `flat`), has rows of more than 2^20 values,
            has more than 2^24 values, or cannot be read.
    """
    tensor = find(source, name)
    first, last = part if part and len(tensor.shape) > 1 else (0, tensor.rows)
    count = min(last, tensor.rows) - first
    if (tensor.rows != 1 and not flat) or tensor.columns > 1 << 20 or not 0 <= count * tensor.columns <= 1 << 24:
        raise ModelError(f"{source.label}: tensor {name} has shape {list(tensor.shape)}; a vector is expected")
    values = decode(tensor.element, source.read(tensor, (first, first + count), (0, tensor.columns))).reshape(-1)
    return values[slice(*part)] if part and len(tensor.shape) <= 1 else values
