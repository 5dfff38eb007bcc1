"""A record of the images that running processes use, so that no other process removes them.

    <root>/change.lock       locked while a process removes images or declares the images that it uses
    <root>/uses/<name>.json  the keys (`<block id>/<ranges>`) that one process uses; locked while the process lives

A process reads the uses of the others and removes images under the first lock, so declared images are never removed.
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
    """The images of one shard cache that this process uses."""

    def __init__(self, root: Path) -> None:
        """Declare that this process uses no image yet. `root` must exist.

        Raises:
            OSError: if `root` cannot be written.
        """
        self._root = root
        make_private(root / "uses")
        self._path = root / "uses" / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        with change_lock(root):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def declare(self, keys: Iterable[str]) -> None:
        """Declare that this process uses the images `keys` from now on, and no others.

        Raises:
            OSError: if the disk is full or failing.
        """
        text = json.dumps(sorted(keys)).encode()
        with change_lock(self._root):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)

    def others(self) -> set[str]:
        """Return the keys of images that other processes use. Call it inside `change_lock`."""
        return keys_in_use(self._root, but=self._path)

    def close(self) -> None:
        """Declare that this process uses no image any more, and release its file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._file)


@contextmanager
def change_lock(root: Path) -> Iterator[None]:
    """Hold the lock that a process needs to remove images of `root`, or to declare that it uses them.

    First wait until no other process holds the lock.
    """
    handle = os.open(root / "change.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def keys_in_use(root: Path, but: Path | None = None) -> set[str]:
    """Return the keys of images that running processes use, except the process whose file is `but`."""
    found: set[str] = set()
    for path in (root / "uses").glob("*.json"):
        if path != but:
            found |= _keys(path)
    return found


def _keys(path: Path) -> set[str]:
    """Return the keys in one process's file; if that process has ended, remove the file and return no keys."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return set()
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        with suppress(OSError, ValueError):  # the process has not declared anything yet
            return set(json.loads(path.read_bytes()))
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    return set()
