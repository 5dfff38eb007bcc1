"""Inventory of the models and packs in a cache, with sizes and last uses. `worker.shards.inventory` lists shards."""

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
from tpi.pack.library.store import remove_partial

# older versions also made packs that were gate-first
_PACK_NAME = re.compile(r"((.+)-(?:auto|f32|bf16|q8|q4|q4s)(?:-gate-first)?)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Entry:
    """A model, a pack or a cache of shards, which can be removed independently of the others."""

    kind: Literal["model", "pack", "shards"]
    name: str
    path: Path  # for shards, the cache that holds them
    nbytes: int  # bytes allocated on disk
    last_used: float  # seconds since 1970
    reproducible: bool  # it can be made or downloaded again
    in_use: bool  # a running process holds it

    def matches(self, name: str) -> bool:
        """Return True if `name` is the entry's name, that name without the hash, or the name of the pack's model."""
        found = _PACK_NAME.fullmatch(self.name)
        return name in (self.name, *(found.groups() if found else ()))


def stored_models(cache: Path) -> Iterator[Entry]:
    """Yield the models that `tpi pull` has downloaded by an alias."""
    aliases = {Path(alias.member).name: name for name, alias in ALIASES.items()}
    for path in _visible(cache / "models"):
        name = aliases.get(path.name, path.name)
        yield Entry("model", name, path, disk_bytes(path), last_used(path), path.name in aliases, in_use(path))


def stored_packs(cache: Path) -> Iterator[Entry]:
    """Yield the packs of the cache, whether or not their sources still exist."""
    known = records(cache)
    for path in _visible(cache / "packs"):
        again = _has_source(known.get(path.absolute()))
        yield Entry("pack", path.name, path, disk_bytes(path), last_used(path), again, in_use(path))


def remove_stored(entry: Entry) -> bool:
    """Remove a model or a pack, and remains of interrupted runs next to it. Return False if the entry is in use.

    Raises:
        OSError: if the disk cannot be written.
    """
    remove_partial(entry.path.parent)
    return remove(entry.path)


def disk_bytes(path: Path) -> int:
    """Return the bytes that the file system has allocated to a file, or to all files in a directory."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        with suppress(OSError):  # the file may be removed meanwhile
            total += file.lstat().st_blocks * 512  # a link counts its own size; its target is counted where it lies
    return total


def _visible(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (path for path in sorted(directory.iterdir()) if not path.name.startswith("."))


def _has_source(record: PackRecord | None) -> bool:
    """Return True if the source of the recorded pack still exists and has not changed."""
    if record is None or not record.source:
        return False
    with suppress(TpiError, OSError):
        return identity(Path(record.source), record.dtype) == record.identity
    return False
