"""Resolve the argument of `-m` to a model on disk, and open that model as a pack."""

import os
import re
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from weakref import finalize

from tpi.errors import ModelError
from tpi.pack.groups import WEIGHTED
from tpi.pack.library.hold import Hold
from tpi.pack.library.hubfiles import HubModel
from tpi.pack.library.pull import ALIASES, pull
from tpi.pack.library.quantisations import House, this_machine
from tpi.pack.library.record import PackRecord
from tpi.pack.manifest import PACK_VERSION
from tpi.pack.reader import Pack, is_pack
from tpi.paths import user_path
from tpi.progress import Phase, phase
from tpi.sources.ggufparts import gguf_name, gguf_parts, is_auxiliary
from tpi.system.machine import return_memory

if TYPE_CHECKING:
    from tpi.pack.builder.build import Room

ACCEPTED = (
    f"an alias ({', '.join(ALIASES)}), a directory in Hugging Face format, a .gguf file, a pack directory, or a hub id "
    "such as Qwen/Qwen3-0.6B or, of GGUF files, owner/name:Q4_K_M"
)
_MAKING = 4  # version of the packer; increase it when the same source results in a different pack
_MAKING_4_BITS = 5  # the same, with --dtype q4 or q4s
_SMALL = 1 << 20  # bytes; files up to this size are identified by their content, larger ones by their time
_PARTS = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
)


@dataclass(frozen=True)
class Located:
    """A model on disk: its kind, its path and its name for display."""

    kind: Literal["pack", "gguf", "directory"]
    path: Path
    name: str


def open_model(spec: str, dtype: str, cache: Path, progress: Phase = phase) -> Pack:
    """Open the model that `spec` names. If the cache has no pack of it, make one first.

    A second call finds the pack by the identity of the source's files, in milliseconds.

    Args:
        spec: an alias (smollm2-135m), a Hugging Face directory, a .gguf file, a pack directory, or a hub id.
        dtype: auto, f32, bf16, q8, q4 or q4s; ignored for a pack directory, which is used as it is.
        cache: the directory that holds `packs/` and `models/`.
        progress: starts a display of progress; `tpi.progress.phase` prints to stderr.

    Raises:
        ModelError: if the model is unknown, damaged or not supported.
        WeightsError: if a block of an existing pack is missing, or the disk is full.
    """
    return open_located(locate(spec, cache, progress), dtype, cache, progress)


def open_located(
    located: Located,
    dtype: str,
    cache: Path,
    progress: Phase = phase,
    room: "Room | None" = None,
) -> Pack:
    """Open a model that `locate` found. If the cache has no pack of it, make one first.

    The pack is not removed from the cache while the returned object exists. Damaged files are made again
    (`tpi.pack.builder.repair`).

    Args:
        located: the model.
        dtype: auto, f32, bf16, q8, q4 or q4s; ignored for a pack directory.
        cache: the directory that holds `packs/` and `models/`.
        progress: starts a display of progress.
        room: called before packing with the number of bytes needed; it may free that much space in the cache.

    Raises:
        ModelError: if the model is damaged or not supported.
        WeightsError: if a damaged pack cannot be made again, or the disk is full.
    """
    from tpi.pack.builder.repair import open_repaired, record_new_pack

    inside = located.kind != "pack"
    target = cache / "packs" / pack_name(located, dtype) if inside else located.path
    record = PackRecord.load(cache, target)
    if inside:
        record.source, record.dtype, record.identity = str(located.path.absolute()), dtype, _hash(target.name)
    pulled = located.path.parent == cache / "models"
    with closing(Hold(located.path, pulled)), closing(Hold(target, target.parent == cache / "packs")):
        if inside and not target.is_dir():
            from tpi.pack.builder.build import open_source, pack_model

            pack_model(open_source(located.path), dtype, target, progress, room=room)
            record_new_pack(record)
            return_memory()  # glibc may retain up to 90 MiB, which the node would count as memory of the bare process
        pack = open_repaired(record, identity, progress)
        finalize(pack, Hold(target, target.parent == cache / "packs").close)  # repairs may have replaced the directory
    return pack


def identity(source: Path, dtype: str) -> str:
    """Return the hash at the end of `pack_name`. It covers the source's files, but not the model's name."""
    return _hash(pack_name(_directory(source) if source.is_dir() else _file(source), dtype))


def _hash(name: str) -> str:
    return name.rpartition("-")[2]


def locate(
    spec: str, cache: Path, progress: Phase = phase, weights: bool = True, house: House = this_machine
) -> Located:
    """Find the model that `spec` names. An alias or hub id that is not on this machine is downloaded.

    If `weights` is False, the weights of a Hugging Face directory are not downloaded. `house` returns the memory that
    the model may use, which decides between GGUF models of a repository.

    Raises:
        ModelError: if there is no such model; the message lists the forms that are accepted.
    """
    path = user_path(spec)
    if spec.lower() in ALIASES and not path.is_file():
        return Located("gguf", pull(spec, cache, progress), spec.lower())
    if path.is_dir():
        return _directory(path, cache)
    if path.is_file():
        return _file(path)
    if model := HubModel.parse(spec):
        from tpi.pack.library.hub import hub_model  # here: it imports ssl, email and others

        found = hub_model(model, cache, progress, weights, house)
        return Located("directory", found, model.name) if found.is_dir() else _file(found)
    raise ModelError(f"there is no model {spec!r}; give {ACCEPTED}")


def pack_name(located: Located, dtype: str) -> str:
    """Return the pack's directory name in the cache: a readable name, and a hash of all that the pack depends on."""
    files = [part for part in gguf_parts(located.path) if part.exists()]
    if located.kind == "directory":
        files = sorted({file for pattern in _PARTS for file in located.path.glob(pattern) if file.is_file()})
    making = _MAKING_4_BITS if dtype in WEIGHTED else _MAKING
    identity = sha256(f"{PACK_VERSION}.{making} {dtype}".encode())
    for file in files:
        state = file.stat()
        stamp = sha256(file.read_bytes()).hexdigest() if state.st_size <= _SMALL else str(state.st_mtime_ns)
        identity.update(os.fsencode(f"\0{file.name}\0{state.st_size}\0{stamp}"))
    readable = re.sub(r"[^\w.-]+", "-", located.name).strip(".-")[:60]
    return f"{readable}-{dtype}-{identity.hexdigest()[:16]}"


def _directory(path: Path, cache: Path | None = None) -> Located:
    if is_pack(path) or (cache and PackRecord.load(cache, path).source):  # a damaged pack may lack its manifest
        return Located("pack", path, path.name)
    found = {gguf_parts(file)[0]: gguf_name(file) for file in sorted(path.glob("*.gguf")) if file.is_file()}
    found = {file: name for file, name in found.items() if not is_auxiliary(file.name)}
    if (path / "config.json").exists() and (not found or any(path.glob("*.safetensors"))):
        return Located("directory", path, path.resolve().name)
    if len(found) == 1:
        return Located("gguf", *found.popitem())
    several = f"; it holds {len(found)} GGUF models, name one of {', '.join(map(str, found))}"[:1000] if found else ""
    raise ModelError(f"{path} has neither manifest.json (a pack) nor config.json (a model){several}")


def _file(path: Path) -> Located:
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(
            f"{path} is a pickle, which can run any code when it is opened; convert the model to safetensors first "
            "(in transformers: load it and call save_pretrained)"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return Located("gguf", gguf_parts(path)[0], gguf_name(path))
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path} is one file of a model; give its directory {path.parent}")
    raise ModelError(f"{path} is not a model; give {ACCEPTED}")
