"""Safetensors directories, single or sharded. Headers and index are checked strictly before anything in them is used.

The format: 8 bytes of header length, a JSON header with the dtype, shape and byte range of each tensor, then the data.
The tensors cover the data without gaps.
"""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from tpi.errors import ModelError
from tpi.sources.base import FileSource, SourceTensor
from tpi.sources.elements import Element
from tpi.sources.files import parse_json, read_json, resolve_inside

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER = 8 << 20  # bytes
_MAX_SHARDS = 1 << 12


def open_safetensors(directory: Path) -> FileSource:
    """Open the safetensors files of a Hugging Face directory.

    Raises:
        ModelError: if there are no safetensors files, or one is damaged or hostile; the message names the file.
    """
    if (directory / INDEX).exists():
        files = _indexed(directory)
    elif (directory / SINGLE).exists():
        files = [resolve_inside(directory, SINGLE)]
    else:
        raise ModelError(_missing(directory))
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise ModelError(
                    f"{file} repeats tensor {tensor.name} of {tensors[tensor.name].path.name}; download the model again"
                )
            tensors[tensor.name] = tensor
    return FileSource(str(directory), tensors)


def read_header(path: Path) -> list[SourceTensor]:
    """Return the tensors that the header of one file describes.

    The header is refused if a type is unknown, a size does not fit its shape, a name occurs twice, or byte ranges
    overlap or leave a gap.

    Raises:
        ModelError: if the file cannot be read or a check fails; the message names the file and says what is wrong.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelError(
                    f"{path} is not a safetensors file, or it is truncated: its header cannot have {length} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return _tensors(path, _parse(path, text), 8 + length, size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text, _unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not valid ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} occurs twice")
        found[name] = value
    return found


def _tensors(path: Path, header: dict[str, Any], start: int, size: int) -> list[SourceTensor]:
    found = []
    for name, entry in header.items():
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(number) is int and 0 <= number <= size for number in (*shape, first, last))
            fits = whole and len(shape) <= 8 and last - first == prod(shape) * _SIZES[dtype]
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ModelError(f"{path}: tensor {name[:80]!r} has an impossible type, shape or byte range")
        found.append((first, last, SourceTensor(name, shape, Element(dtype, 1, _SIZES[dtype]), path, start + first)))
    found.sort(key=lambda item: item[:2])
    end = 0
    for first, last, tensor in found:
        if first != end:
            raise ModelError(f"{path}: the bytes of tensor {tensor.name[:80]!r} overlap others or leave a gap")
        end = last
    if start + end != size:
        raise ModelError(f"{path} has {size} bytes, but its header describes {start + end}; download it again")
    return [tensor for _, _, tensor in found]


def _indexed(directory: Path) -> list[Path]:
    index = read_json(directory, INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map; download it again")
    shards = sorted(set(names.values()))
    if len(shards) > _MAX_SHARDS:
        raise ModelError(f"{directory / INDEX} lists {len(shards)} files, more than {_MAX_SHARDS}")
    return [resolve_inside(directory, name) for name in shards]


def _missing(directory: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        return (
            f"{directory} has only {pickled[0]}, a pickle, which can run any code when it is opened; convert the model "
            "to safetensors first (in transformers: load it and call save_pretrained)"
        )
    return f"{directory} has no {SINGLE} and no {INDEX}"
