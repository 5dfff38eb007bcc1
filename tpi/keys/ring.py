"""The keys of other machines that this one trusts, in one file that is replaced as a whole."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tpi.errors import UsageError
from tpi.keys.text import key_text, parse_key, short_key
from tpi.system.atomic import write_atomically
from tpi.system.private import make_private
from tpi.text import plain

FILE = "keys.json"


@dataclass(frozen=True)
class PairedKey:
    """A machine that this one trusts.

    `host` is its address when it was paired, `since` the time in seconds since 1970.
    """

    name: str
    key: bytes
    host: str = ""
    since: float = 0.0


@dataclass(frozen=True)
class TrustedKeys:
    """The keys of other machines that this machine trusts, as the key file lists them."""

    paired: tuple[PairedKey, ...] = ()
    revoked: frozenset[bytes] = frozenset()

    def find(self, key: bytes) -> PairedKey | None:
        """Return the paired machine that owns `key`, or None."""
        return next((one for one in self.paired if one.key == key), None)


class KeyRing:
    """The keys in a folder, read again whenever the file has changed.

    Several processes and threads may use one folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._stamp: tuple[int, ...] | None = None
        self._keys = TrustedKeys()

    def read(self) -> TrustedKeys:
        """Return the keys that are in the file now.

        Raises:
            UsageError: if the file is damaged or cannot be read.
        """
        try:
            self._look()
        except FileNotFoundError:
            self._stamp, self._keys = None, TrustedKeys()
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be read: {error.strerror or error}; make it readable, or set TPI_CONFIG to "
                "another directory"
            ) from error
        return self._keys

    def _look(self) -> None:
        state = self.path.stat()
        if not S_ISREG(state.st_mode):
            raise UsageError(f"{self.path} is not a regular file; remove it, and pair your machines again")
        stamp = (state.st_ino, state.st_mtime_ns, state.st_size)
        if stamp != self._stamp:
            keys = _parsed(self.path)
            self._keys, self._stamp = keys, stamp

    def pair(self, one: PairedKey) -> None:
        """Trust a key. It replaces an entry with the same key, and the key is no longer revoked.

        Raises:
            UsageError: if the file is damaged or cannot be written.
        """
        with self._changing() as keys:
            others = tuple(other for other in keys.paired if other.key != one.key)
            named = replace(one, name=_free_name(plain(one.name) or short_key(one.key), others), since=time.time())
            self._write(TrustedKeys((*others, named), keys.revoked - {one.key}))

    def revoke(self, which: str) -> PairedKey:
        """Stop trusting the machine named `which`, a name or the first characters of a key. Return its entry.

        Raises:
            UsageError: if no machine or several match, or the file cannot be written.
        """
        with self._changing() as keys:
            found = _found(keys, which)
            self._write(TrustedKeys(tuple(one for one in keys.paired if one != found), keys.revoked | {found.key}))
        return found

    @contextmanager
    def _changing(self) -> Iterator[TrustedKeys]:
        """Lock the file against other processes for the block, and yield its content."""
        try:
            make_private(self.path.parent)
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield self.read()
            finally:
                os.close(lock)
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path}: {error.strerror or error}; make its directory writable, or set TPI_CONFIG "
                "to another one"
            ) from error

    def _write(self, keys: TrustedKeys) -> None:
        paired = [asdict(one) | {"key": key_text(one.key)} for one in keys.paired]
        fields = {"version": 1, "paired": paired, "revoked": sorted(map(key_text, keys.revoked))}
        write_atomically(self.path, json.dumps(fields, indent=1).encode())


def _parsed(path: Path) -> TrustedKeys:
    content = path.read_bytes()
    try:
        fields = json.loads(content)
        paired = tuple(_paired(one) for one in fields["paired"])
        return TrustedKeys(paired, frozenset(map(parse_key, fields["revoked"])))
    except (ValueError, TypeError, LookupError, AttributeError, UsageError) as error:
        raise UsageError(f"{path} is damaged ({error}); remove it, and pair your machines again") from error


def _paired(fields: dict[str, Any]) -> PairedKey:
    return PairedKey(plain(fields["name"]), parse_key(fields["key"]), str(fields["host"]), float(fields["since"]))


def _free_name(name: str, others: tuple[PairedKey, ...]) -> str:
    """Return `name`, with a number appended if another machine has this name."""
    taken = {one.name for one in others}
    names = (name, *(f"{name} {number}" for number in range(2, len(taken) + 3)))
    return next(one for one in names if one not in taken)


def _found(keys: TrustedKeys, which: str) -> PairedKey:
    wanted = which.strip().lower().replace("-", "").replace(" ", "")
    named = [one for one in keys.paired if one.name == which]
    keyed = [one for one in keys.paired if wanted and key_text(one.key).replace("-", "").startswith(wanted)]
    found = named or keyed
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{one.name} ({short_key(one.key)})" for one in keys.paired) or "none"
    means = "is not a paired machine" if not found else "matches several machines"
    raise UsageError(f"{which!r} {means}; give one of these names or keys: {known}")
