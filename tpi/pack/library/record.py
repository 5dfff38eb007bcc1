"""Records of packs on this machine: the source of a pack, and which of its files were intact when last checked.

A record is a file in the cache, not in the pack, because a pack may be copied or read-only.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path

from tpi.system.private import make_private, private

Stamp = list[int]


@dataclass
class PackRecord:
    """The record of the pack in the directory `pack`. An empty field means that the value is not known."""

    cache: Path
    pack: Path
    source: str = ""  # absolute path of the model that the pack was made from
    dtype: str = ""
    identity: str = ""  # `tpi.pack.library.locate.identity` of the source when the pack was made
    checked: dict[str, Stamp] = field(default_factory=dict)  # by file name: the `stamp` of the file when it was intact
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the manifest and tokenizer, which have no hashes

    @classmethod
    def load(cls, cache: Path, pack: Path) -> "PackRecord":
        """Read the record of `pack` from the cache; return an empty one if there is none or it cannot be read."""
        record = cls(cache, pack.absolute())
        with suppress(OSError, ValueError, TypeError):
            stored = json.loads(record.file.read_bytes())
            if stored.pop("pack") == str(record.pack):
                known = {one.name for one in fields(cls)}  # an older version may have stored more
                return cls(cache, record.pack, **{name: stored[name] for name in known & stored.keys()})
        return record

    @property
    def file(self) -> Path:
        """Path of the record's file in the cache."""
        return self.cache / "records" / f"{sha256(os.fsencode(self.pack)).hexdigest()[:32]}.json"

    def save(self) -> None:
        """Write the record's file. Do nothing if the disk cannot be written; the pack is then checked again later."""
        stored = {**asdict(self), "pack": str(self.pack)}
        del stored["cache"]
        draft = self.file.with_suffix(f".{os.getpid()}.tmp")
        try:
            make_private(self.file.parent)
            with open(draft, "w", opener=private) as file:
                json.dump(stored, file)
            draft.replace(self.file)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def mark_intact(self, files: Iterable[str]) -> None:
        """Record that these files of the pack are intact in their present state."""
        for name in files:
            if found := stamp(self.pack / name):
                self.checked[name] = found

    def is_unchanged(self, name: str) -> bool:
        """Return True if the file has not changed since it was found intact, by its size, times and inode."""
        found = stamp(self.pack / name)
        return found is not None and self.checked.get(name) == found


def stamp(path: Path) -> Stamp | None:
    """Return the size, modification time, change time and inode of a file; None if it cannot be examined.

    Times are in nanoseconds.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def records(cache: Path) -> dict[Path, PackRecord]:
    """Return the records of all packs that still exist, by directory. Delete the records of the others."""
    found: dict[Path, PackRecord] = {}
    for file in (cache / "records").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = PackRecord.load(cache, Path(json.loads(file.read_bytes())["pack"]))
            if record.pack.is_dir():
                found[record.pack] = record
            else:
                file.unlink(missing_ok=True)
    return found
