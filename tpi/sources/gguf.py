"""GGUF files, versions 2 and 3, little-endian. The header is checked strictly before anything in it is used.

The format: magic, version, counts, metadata (typed key-value pairs), tensor descriptions, padding, data. Long arrays,
such as the vocabulary, are skipped, and read only when they are requested.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tpi.errors import ModelError
from tpi.sources.base import FileSource, SourceTensor
from tpi.sources.elements import GGML_TYPES, Element
from tpi.sources.ggufparts import gguf_parts

_MAGIC, _POWERINFER = b"GGUF", b"PWRI"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_MAX_HEADER = 24 << 20  # bytes; the largest vocabularies take about 12 MB
_MAX_PAIRS = 1 << 12
_MAX_TENSORS = 1 << 15
_MAX_STRING = 1 << 20
_MAX_TEXT = 8 << 20  # bytes of all strings that are read into memory
_MAX_STRINGS = 1 << 20  # in all long arrays together
_KEPT = 1 << 8  # arrays of at most this many values are read with the header; longer ones are skipped
# PowerInfer uses the type numbers of an early ggml. ggml later gave these numbers to other types; I32 became 26.
_POWERINFER_TYPES: dict[int, tuple[str, int, int]] = {
    16: ("I8", 1, 1), 17: ("I16", 1, 2), 18: ("I32", 1, 4), 26: ("I32", 1, 4),
}  # fmt: skip
_OWN = ("split.no", "general.alignment")  # metadata that may differ between the parts of a split model
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class LongArray:
    """A long array of the metadata, which was skipped when the header was read. `GgufSource.array` reads the array."""

    kind: int  # GGUF's number for the type of the values
    count: int
    offset: int  # of the first value in the file, bytes


class GgufSource(FileSource):
    """The tensors and metadata of a GGUF model.

    `path` is its first file. `powerinfer` is True if the file has PowerInfer's magic instead of GGUF's.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, SourceTensor], powerinfer: bool = False
    ) -> None:
        super().__init__(str(path), tensors)
        self.path = path
        self.metadata = metadata
        self.powerinfer = powerinfer

    def array(self, key: str) -> list[Any]:
        """Return the values of the metadata array `key`, however long; an empty list if there is none."""
        found = self.metadata.get(key, [])
        if not isinstance(found, LongArray):
            return list(found) if isinstance(found, list) else []
        with _Header(self.path) as header:
            header.at = found.offset
            return header.values(found.kind, found.count)

    def text(self, key: str) -> str | None:
        """Return the metadata string `key`, or None if there is none.

        Raises:
            ModelError: if the string is not UTF-8.
        """
        found = self.metadata.get(key)
        if not isinstance(found, str):
            return None
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"{self.path}: its {key} is not UTF-8 (character {error.start}); convert the model again"
            ) from error
        return found


def open_gguf(path: Path) -> GgufSource:
    """Read and check the header of a GGUF file. If the model is split into several files, do so for each of them.

    Raises:
        ModelError: if a file is missing or damaged; the message names it and says what is wrong.
    """
    parts = gguf_parts(path)
    if len(parts) > 1 and not path.exists():
        raise _missing(path, len(parts))
    opened = _open_one(path)
    count = opened.metadata.get("split.count", 1)
    if count in (0, 1):
        return opened
    if count != len(parts):
        raise ModelError(
            f"{path} is part of a model in {count!r:.20} files, but its name says {len(parts)}; download all parts "
            "again and keep their names"
        )
    return _joined(parts, [_open_part(part, number, len(parts)) for number, part in enumerate(parts)])


def _open_one(path: Path) -> GgufSource:
    if path.exists() and not path.is_file():  # opening a FIFO would block
        raise ModelError(f"{path} is not a regular file; put the file itself there")
    try:
        with _Header(path) as header:
            header.start()
            count, pairs = header.u64(), header.u64()
            if count > _MAX_TENSORS or pairs > _MAX_PAIRS:
                raise header.bad(f"{count} tensors or {pairs} metadata entries are too many")
            metadata = header.pairs(pairs)
            return GgufSource(path, metadata, header.tensors(count, metadata), header.powerinfer)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _open_part(path: Path, number: int, count: int) -> GgufSource:
    """Open one part of a split model and check that it is that part.

    `number` counts the parts from 0; `count` is how many there are.
    """
    if not path.exists():
        raise _missing(path, count)
    part = _open_one(path)
    said = tuple(part.metadata.get(f"split.{key}") for key in ("no", "count"))
    if said != (number, count):
        raise ModelError(
            f"{path}: its header says part {said[0]!r:.20} (from 0) of {said[1]!r:.20}, but its name says {number} of "
            f"{count}; download it again and keep its name"
        )
    return part


def _missing(path: Path, count: int) -> ModelError:
    return ModelError(f"{path} is missing, one of the {count} files of the model; download it too")


def _joined(paths: Sequence[Path], parts: Sequence[GgufSource]) -> GgufSource:
    """Return the model that the parts make up. Its metadata is the first part's; other parts must not contradict it.

    Raises:
        ModelError: if a part's metadata differs, a tensor is in two parts, or the number of tensors is wrong.
    """
    first, tensors = parts[0], dict[str, SourceTensor]()
    for path, part in zip(paths, parts, strict=True):
        for key, value in part.metadata.items():
            if key not in _OWN and first.metadata.get(key, value) != value:
                raise ModelError(
                    f"{path} belongs to another model than {paths[0]}: {key[:80]} differs; download it again"
                )
        if twice := next((name for name in part.tensors if name in tensors), None):
            raise ModelError(f"{path} repeats tensor {twice[:80]!r} of {tensors[twice].path.name}; download it again")
        tensors |= part.tensors
    whole = first.metadata.get("split.tensors.count", len(tensors))
    if whole != len(tensors):
        raise ModelError(f"the parts of {paths[0]} hold {len(tensors)} tensors, not {whole!r:.20}; download them again")
    return GgufSource(paths[0], first.metadata, tensors, first.powerinfer)


class _Header:
    """A cursor over the header of a file. More of the file is read as needed, up to `_MAX_HEADER` bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        self._file = path.open("rb")
        self._data = b""
        self._strings = 0
        self._text = 0
        self.powerinfer = False
        self.size = self._file.seek(0, 2)

    def __enter__(self) -> "_Header":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def bad(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is not a usable GGUF file: {reason}")

    def start(self) -> int:
        """Read the magic and the version, and return the version. An unsupported one is refused."""
        magic = self._take(4) if self.size >= 24 else b""
        if magic not in (_MAGIC, _POWERINFER):
            raise self.bad("it does not begin with the GGUF magic")
        self.powerinfer = magic == _POWERINFER
        version = int.from_bytes(self._take(4), "little")
        if version not in (2, 3):
            raise self.bad(f"its version is {version}; supported are 2 and 3 (little-endian); convert the model again")
        return version

    def u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def string(self, errors: str = "replace") -> str:
        """Read a string: its length, then that many bytes of UTF-8. `errors` is passed on to `bytes.decode`."""
        length = self.u64()
        self._text += length
        if length > _MAX_STRING:
            raise self.bad(f"a string of {length} bytes is too long")
        if self._text > _MAX_TEXT:
            raise self.bad(f"its strings together have more than {_MAX_TEXT} bytes")
        return self._take(length).decode("utf-8", errors)

    def value(self, kind: int) -> Any:
        """Read one metadata value of the type `kind`. A long array is skipped and returned as a `LongArray`.

        In a string, bytes that are not UTF-8 become lone surrogates.
        """
        if kind == _STRING:
            return self.string("surrogateescape")
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.bad(f"a metadata value has the unknown type {kind}")
        form = _SCALARS[kind]
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def values(self, kind: int, count: int) -> list[Any]:
        """Read `count` consecutive values of the type `kind`. In strings, bytes that are not UTF-8 are replaced."""
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        form = f"<{count}{_SCALARS[kind][1]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form))))

    def pairs(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in found:
                raise self.bad(f"the metadata key {key[:80]!r} occurs twice")
            found[key] = self.value(self._u32())
        return found

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, SourceTensor]:
        """Read `count` tensor descriptions, by name.

        The tensors' data must lie inside the file, one after the other, each padded to the alignment.
        """
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment % 8 or not 8 <= alignment <= 1 << 16:
            raise self.bad(f"its alignment is {alignment!r}, not a multiple of 8 from 8 to 65536")
        described = [self._tensor() for _ in range(count)]
        start = _align(self.at, alignment)
        found: dict[str, SourceTensor] = {}
        end = 0
        for name, shape, element, offset in sorted(described, key=lambda item: item[3]):
            if name in found:
                raise self.bad(f"tensor {name[:80]!r} occurs twice")
            if offset != end:
                raise self.bad(f"the bytes of tensor {name[:80]!r} overlap others, leave a gap or are not aligned")
            tensor = found[name] = SourceTensor(name, shape, element, self.path, start + offset)
            end = offset + tensor.rows * tensor.row_bytes
            if start + end > self.size:
                raise self.bad(f"tensor {name[:80]!r} ends after the end of the file; download it again")
            end = _align(end, alignment)
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], Element, int]:
        name, dimensions = self.string(), self._u32()
        if not 1 <= dimensions <= 4:
            raise self.bad(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(reversed([self.u64() for _ in range(dimensions)]))
        kind, offset = self._u32(), self.u64()
        types = GGML_TYPES | _POWERINFER_TYPES if self.powerinfer else GGML_TYPES
        if kind not in types:
            raise self.bad(f"tensor {name[:80]!r} has the unknown type {kind}")
        element = Element(*types[kind])
        if not all(1 <= length <= self.size * 8 for length in shape) or prod(shape) > self.size * 8:
            raise self.bad(f"tensor {name[:80]!r} has the impossible shape {list(shape)}")
        if shape[-1] % element.group:
            raise self.bad(f"tensor {name[:80]!r} has rows of {shape[-1]}, not a multiple of {element.group}")
        return name, shape, element, offset

    def _array(self) -> list[Any] | LongArray:
        kind, count = self._u32(), self.u64()
        if kind == _ARRAY:
            raise self.bad("nested arrays are not supported")
        if count > _MAX_HEADER:
            raise self.bad(f"an array of {count} values is too long")
        if count <= _KEPT:
            return self.values(kind, count)
        skipped = LongArray(kind, count, self.at)
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.at += count * struct.calcsize(_SCALARS[kind])
            self._need(self.at)
        else:
            raise self.bad(f"an array has the unknown type {kind}")
        return skipped

    def _skip_strings(self, count: int) -> None:
        self._strings += count
        if self._strings > _MAX_STRINGS:
            raise self.bad(f"it holds more than {_MAX_STRINGS} strings")
        at, unpack = self.at, _U64.unpack_from
        for _ in range(count):
            if at + 8 > len(self._data):
                self._need(at + 8)
            at += 8 + unpack(self._data, at)[0]
        self.at = at
        self._need(at)

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _take(self, count: int) -> bytes:
        self._need(self.at + count)
        taken = self._data[self.at : self.at + count]
        self.at += count
        return taken

    def _need(self, end: int) -> None:
        """Make sure that the first `end` bytes of the file are in memory. Read those that are missing."""
        if end <= len(self._data):
            return
        if end > self.size:
            raise self.bad("it ends inside its header; download it again")
        if end > _MAX_HEADER:
            raise self.bad(f"its header is longer than {_MAX_HEADER} bytes")
        wanted = min(max(2 * len(self._data), end, 1 << 18), _MAX_HEADER, self.size)
        self._file.seek(0)
        self._data = b""
        self._data = self._file.read(wanted)
        if len(self._data) < end:
            raise self.bad("it has become shorter; download it again")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
