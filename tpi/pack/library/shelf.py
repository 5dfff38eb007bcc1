"""Pulled models and packs in a cache, for people and for whoever has to make room. Shards: `worker.shards.shelf`."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpi.errors import TpiError
from tpi.pack.library.hold import in_use, last_used, remove
from tpi.pack.library.locate import identity
from tpi.pack.library.pull import ALIASES
from tpi.pack.library.record import PackRecord, records
from tpi.pack.library.store import sweep

_PACK_NAME = re.compile(r"((.+)-(?:auto|f32|bf16|q8|q4|q4s)(?:-gate-first)?)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Entry:
    """One thing that can be removed by itself."""

    kind: Literal["model", "pack", "shards"]
    name: str
    path: Path  # of shards: their cache
    nbytes: int  # on the disk
    last_used: float  # seconds since 1970
    again: bool  # it can be made, or downloaded, again
    in_use: bool  # by a running process

    def called(self, name: str) -> bool:
        """Whether `name` means this: its own, that without the hash, or that of the model it was made from."""
        found = _PACK_NAME.fullmatch(self.name)
        return name in (self.name, *(found.groups() if found else ()))


def stored_models(cache: Path) -> Iterator[Entry]:
    """The models that `tpi pull` has fetched."""
    aliases = {Path(alias.member).name: name for name, alias in ALIASES.items()}
    for path in _visible(cache / "models"):
        name = aliases.get(path.name, path.name)
        yield Entry("model", name, path, disk_bytes(path), last_used(path), path.name in aliases, in_use(path))


def stored_packs(cache: Path) -> Iterator[Entry]:
    """The packs, whether or not their sources are still there."""
    known = records(cache)
    for path in _visible(cache / "packs"):
        again = _has_source(known.get(path.absolute()))
        yield Entry("pack", path.name, path, disk_bytes(path), last_used(path), again, in_use(path))


def remove_stored(entry: Entry) -> bool:
    """Remove a model or a pack, and what interrupted runs have left beside it; False if it is in use.

    Raises:
        OSError: if the disk cannot be written.
    """
    sweep(entry.path.parent)
    return remove(entry.path)


def disk_bytes(path: Path) -> int:
    """Bytes that the file system has given to a file, or to all in a directory."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        with suppress(OSError):  # removed meanwhile
            total += file.lstat().st_blocks * 512  # of a link its own: the file is counted where it is
    return total


def _visible(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (path for path in sorted(directory.iterdir()) if not path.name.startswith("."))


def _has_source(record: PackRecord | None) -> bool:
    """Whether what a pack was made from is still there, and still the same."""
    if record is None or not record.source:
        return False
    with suppress(TpiError, OSError):
        return identity(Path(record.source), record.dtype) == record.identity
    return False
