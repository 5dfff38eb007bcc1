"""What this machine remembers of a pack: where it came from, and which of its files were right when they were checked.

It stays in the cache, not in the pack, which may be copied or read-only.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from tpi.system.private import make_private, private

Stamp = list[int]


@dataclass
class PackRecord:
    """What is known of the pack in the directory `pack`; empty fields are not known."""

    cache: Path
    pack: Path
    source: str = ""  # absolute path of what it was made from
    dtype: str = ""
    identity: str = ""  # `tpi.pack.library.locate.pack_name` of the source at that time
    checked: dict[str, Stamp] = field(default_factory=dict)  # by file name: its size and times when it was right
    digests: dict[str, str] = field(default_factory=dict)  # of the files that carry no hashes: manifest, tokenizer
    gate_first: bool = False  # how it was made, see `tpi.pack.builder.plan.plan_pack`

    @classmethod
    def load(cls, cache: Path, pack: Path) -> "PackRecord":
        """What is remembered; an empty record if that is nothing."""
        record = cls(cache, pack.absolute())
        with suppress(OSError, ValueError, TypeError):
            fields = json.loads(record.file.read_bytes())
            if fields.pop("pack") == str(record.pack):
                return cls(cache, record.pack, **fields)
        return record

    @property
    def file(self) -> Path:
        """Where this is kept."""
        return self.cache / "records" / f"{sha256(os.fsencode(self.pack)).hexdigest()[:32]}.json"

    def save(self) -> None:
        """Write it down; what a disk that cannot be written forgets is checked again."""
        fields = {**asdict(self), "pack": str(self.pack)}
        del fields["cache"]
        draft = self.file.with_suffix(f".{os.getpid()}.tmp")
        try:
            make_private(self.file.parent)
            with open(draft, "w", opener=private) as file:
                json.dump(fields, file)
            draft.replace(self.file)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def trust(self, files: Iterable[str]) -> None:
        """These files are right as they are now."""
        for name in files:
            if found := stamp(self.pack / name):
                self.checked[name] = found

    def trusts(self, name: str) -> bool:
        """Whether a file has not changed since it was right."""
        found = stamp(self.pack / name)
        return found is not None and self.checked.get(name) == found


def stamp(path: Path) -> Stamp | None:
    """What changes when the file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def records(cache: Path) -> dict[Path, PackRecord]:
    """All records of packs that are still there, by the pack's directory; forgets the others."""
    found: dict[Path, PackRecord] = {}
    for file in (cache / "records").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = PackRecord.load(cache, Path(json.loads(file.read_bytes())["pack"]))
            if record.pack.is_dir():
                found[record.pack] = record
            else:
                file.unlink(missing_ok=True)
    return found
