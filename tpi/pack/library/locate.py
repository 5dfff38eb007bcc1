"""From what the user typed after `-m` to a model on disk, and from there to an open pack."""

import os
import re
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from weakref import finalize

from tpi.errors import ModelError
from tpi.pack.library.hold import Hold
from tpi.pack.library.hub import hub_model
from tpi.pack.library.hubfiles import HubModel
from tpi.pack.library.pull import ALIASES, pull
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
_MAKING = 2  # goes up where the same source gives another pack than before
_SMALL = 1 << 20  # bytes up to which a file counts with its content
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
    """Where a model is: a pack, a GGUF file, or a Hugging Face directory."""

    kind: Literal["pack", "gguf", "directory"]
    path: Path
    name: str


def open_model(spec: str, dtype: str, cache: Path, progress: Phase = phase) -> Pack:
    """The model that `spec` names, packed into `cache` if it is not there yet.

    A second call finds the pack by the identity of the source's files, in milliseconds.

    Args:
        spec: an alias (smollm2-135m), a Hugging Face directory, a .gguf file, a pack directory, or a hub id.
        dtype: auto, f32, bf16, q8, q4 or q4s; a pack directory is taken as it is.
        cache: the directory that holds `packs/` and `models/`.
        progress: opens a phase that shows progress; `tpi.progress.phase` prints to stderr.

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
    gate_first: bool = False,
) -> Pack:
    """As `open_model`, for a model that was found already. `room` makes room in the cache for so many bytes.

    While the pack lives nobody removes it from the cache. What is damaged is made again (`tpi.pack.builder.mend`). With
    `gate_first` it is the pack that lies beside the ordinary one (`tpi.pack.builder.plan.plan_pack`).
    """
    from tpi.pack.builder.mend import made, open_whole

    inside = located.kind != "pack"
    target = cache / "packs" / pack_name(located, dtype, gate_first) if inside else located.path
    record = PackRecord.load(cache, target)
    if inside:
        record.source, record.dtype, record.identity = str(located.path.absolute()), dtype, _hash(target.name)
        record.gate_first = gate_first
    pulled = located.path.parent == cache / "models"
    with closing(Hold(located.path, pulled)), closing(Hold(target, target.parent == cache / "packs")):
        if inside and not target.is_dir():
            from tpi.pack.builder.build import open_source, pack_model

            pack_model(open_source(located.path), dtype, target, progress, room=room, gate_first=gate_first)
            made(record)
            return_memory()  # glibc would keep up to 90 MiB, and a node count it as its bare process
        pack = open_whole(record, identity, progress)
        finalize(pack, Hold(target, target.parent == cache / "packs").close)  # it may be another directory now
    return pack


def identity(source: Path, dtype: str) -> str:
    """The hash at the end of `pack_name`: of all that a pack depends on, whatever its source is called."""
    return _hash(pack_name(_directory(source) if source.is_dir() else _file(source), dtype))


def _hash(name: str) -> str:
    return name.rpartition("-")[2]


def locate(spec: str, cache: Path, progress: Phase = phase, weights: bool = True) -> Located:
    """Find the model that `spec` names; downloads an alias or a hub id that is not there yet.

    Without `weights`, those of a Hugging Face directory are not downloaded.

    Raises:
        ModelError: if there is no such model; it says what is accepted.
    """
    path = user_path(spec)
    if spec.lower() in ALIASES and not path.is_file():
        return Located("gguf", pull(spec, cache, progress), spec.lower())
    if path.is_dir():
        return _directory(path, cache)
    if path.is_file():
        return _file(path)
    if model := HubModel.parse(spec):
        found = hub_model(model, cache, progress, weights)
        return Located("directory", found, model.name) if found.is_dir() else _file(found)
    raise ModelError(f"there is no model {spec!r}; give {ACCEPTED}")


def pack_name(located: Located, dtype: str, gate_first: bool = False) -> str:
    """The name of the pack in the cache: for people, and with a hash of all that the pack depends on."""
    files = [part for part in gguf_parts(located.path) if part.exists()]
    if located.kind == "directory":
        files = sorted({file for pattern in _PARTS for file in located.path.glob(pattern) if file.is_file()})
    identity = sha256(f"{PACK_VERSION}.{_MAKING} {dtype}".encode())
    for file in files:
        state = file.stat()
        stamp = sha256(file.read_bytes()).hexdigest() if state.st_size <= _SMALL else str(state.st_mtime_ns)
        identity.update(os.fsencode(f"\0{file.name}\0{state.st_size}\0{stamp}"))
    readable = re.sub(r"[^\w.-]+", "-", located.name).strip(".-")[:60]
    kind = f"{dtype}-gate-first" if gate_first else dtype
    return f"{readable}-{kind}-{identity.hexdigest()[:16]}"


def _directory(path: Path, cache: Path | None = None) -> Located:
    if is_pack(path) or (cache and PackRecord.load(cache, path).source):  # it may have lost its manifest
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
