"""Which images running processes use, so that nobody removes them under them.

    <root>/change.lock       locked while somebody removes images, or says which ones it uses
    <root>/uses/<name>.json  the keys (`<block id>/<ranges>`) that one process uses, locked by it as long as it lives

Who has said what it uses, under the first lock, keeps it: who removes asks under the same lock.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpi.system.private import FILE, make_private


class Uses:
    """What this process uses of one shard cache."""

    def __init__(self, root: Path) -> None:
        """Say that nothing is used yet; `root` exists.

        Raises:
            OSError: if `root` cannot be written.
        """
        self._root = root
        make_private(root / "uses")
        self._path = root / "uses" / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        with changing(root):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def declare(self, keys: Iterable[str]) -> None:
        """From now on use these images, and no others.

        Raises:
            OSError: if the disk is full or failing.
        """
        text = json.dumps(sorted(keys)).encode()
        with changing(self._root):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)

    def others(self) -> set[str]:
        """The keys that other processes use; to be asked inside `changing`."""
        return keys_in_use(self._root, but=self._path)

    def close(self) -> None:
        """Use nothing any more."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._file)


@contextmanager
def changing(root: Path) -> Iterator[None]:
    """Wait until nobody else changes which images of `root` there are, or are used; hold that."""
    handle = os.open(root / "change.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def keys_in_use(root: Path, but: Path | None = None) -> set[str]:
    """The keys of images that living processes use, except the one whose file is `but`."""
    found: set[str] = set()
    for path in (root / "uses").glob("*.json"):
        if path != but:
            found |= _keys(path)
    return found


def _keys(path: Path) -> set[str]:
    """What one process uses; nothing if it is gone, whose file is removed then."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return set()
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        with suppress(OSError, ValueError):  # it has said nothing yet
            return set(json.loads(path.read_bytes()))
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    return set()
