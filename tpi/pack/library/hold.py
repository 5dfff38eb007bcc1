"""Directories and files that are in use: a stamp in or beside each, touched for the last use, locked while it lasts."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from tpi.pack.library.store import erase
from tpi.system.private import FILE

STAMP = ".used"


class Hold:
    """The use of a directory or a file until it is closed: nobody removes it so long. Its last use is now."""

    def __init__(self, path: Path, wanted: bool = True) -> None:
        """What is gone, or cannot be written, where nobody removes anything, is not held."""
        self._handle: int | None = None
        while wanted and self._handle is None and path.exists():
            try:
                handle = os.open(_stamp(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
            except OSError:
                return
            fcntl.flock(handle, fcntl.LOCK_SH)
            if os.fstat(handle).st_nlink:  # nobody has removed it since
                os.utime(handle)
                self._handle = handle
            else:
                os.close(handle)

    def close(self) -> None:
        """Use it no more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def in_use(path: Path) -> bool:
    """Whether a running process holds a directory or a file."""
    try:
        handle = os.open(_stamp(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def last_used(path: Path) -> float:
    """When a directory or a file was last used; when it was made, if nobody knows. Seconds since 1970."""
    with suppress(OSError):
        return _stamp(path).stat().st_mtime
    return path.stat().st_mtime


def remove(path: Path) -> bool:
    """Remove a directory or a file, with its stamp; False if a running process holds it."""
    handle = os.open(_stamp(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        gone = path.with_name(f".{path.name}.removed.partial")  # what is half removed is never seen
        _stamp(path).unlink(missing_ok=True)
        path.rename(gone)
        erase(gone)
        return True
    finally:
        os.close(handle)


def _stamp(path: Path) -> Path:
    return path / STAMP if path.is_dir() else path.with_name(f".{path.name}{STAMP}")
