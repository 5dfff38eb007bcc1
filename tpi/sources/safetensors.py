"""Safetensors directories, single or sharded: strict checks of header and index before anything is trusted.

The format: 8 bytes of header length, a JSON header naming dtype, shape and byte range of each tensor, then the data,
which the tensors tile without gaps.
"""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from tpi.errors import ModelError
from tpi.sources.base import FileSource, SourceTensor
from tpi.sources.elements import Element
from tpi.sources.files import inside, parse_json, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER = 8 << 20
_MAX_SHARDS = 1 << 12


def open_safetensors(directory: Path) -> FileSource:
    """The tensors of a Hugging Face directory.

    Raises:
        ModelError: naming the file, if there are no safetensors, or they are damaged or hostile.
    """
    if (directory / INDEX).exists():
        files = _indexed(directory)
    elif (directory / SINGLE).exists():
        files = [inside(directory, SINGLE)]
    else:
        raise ModelError(_missing(directory))
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise ModelError(f"{file} repeats tensor {tensor.name} of {tensors[tensor.name].path.name}")
            tensors[tensor.name] = tensor
    return FileSource(str(directory), tensors)


def read_header(path: Path) -> list[SourceTensor]:
    """The tensors of one file, checked: known types, sizes that fit the shapes, no overlap, no gap, no duplicate.

    Raises:
        ModelError: naming the file and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelError(f"{path} is no safetensors file, or it is cut: a header of {length} bytes cannot be")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return _tensors(path, _parse(path, text), 8 + length, size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The header's JSON."""
    try:
        header = parse_json(text, _unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no safetensors file: its header is not valid ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is no safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return header


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} stands there twice")
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
            raise ModelError(f"{path}: the bytes of tensor {tensor.name[:80]!r} overlap others or leave a hole")
        end = last
    if start + end != size:
        raise ModelError(f"{path} has {size} bytes where its header describes {start + end}; download it again")
    return [tensor for _, _, tensor in found]


def _indexed(directory: Path) -> list[Path]:
    index = read_json(directory, INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map; download it again")
    shards = sorted(set(names.values()))
    if len(shards) > _MAX_SHARDS:
        raise ModelError(f"{directory / INDEX} lists {len(shards)} files, more than {_MAX_SHARDS}")
    return [inside(directory, name) for name in shards]


def _missing(directory: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        return (
            f"{directory} has only {pickled[0]}, a pickle, which can run any code when it is opened; convert the model "
            "to safetensors first (in transformers: load it and call save_pretrained)"
        )
    return f"{directory} has no {SINGLE} and no {INDEX}"
