"""Protection of directories and files that are in use from being removed.

Each has a stamp file, in the directory or next to the file. The stamp's modification time is the time of the last use.
A process holds a shared lock on the stamp while it uses the directory or file.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from tpi.pack.library.store import erase
from tpi.system.private import FILE

STAMP = ".used"


class Hold:
    """Shared lock on a directory or a file: `remove` leaves it in place until the lock is closed."""

    def __init__(self, path: Path, wanted: bool = True) -> None:
        """Lock `path` and set the time of its last use to now.

        Nothing is locked if `wanted` is False, if `path` does not exist, or if its stamp cannot be written (then no
        process can remove `path` either).
        """
        self._handle: int | None = None
        while wanted and self._handle is None and path.exists():
            try:
                handle = os.open(_stamp(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
            except OSError:
                return
            fcntl.flock(handle, fcntl.LOCK_SH)
            if os.fstat(handle).st_nlink:  # the stamp was not removed between open and lock
                os.utime(handle)
                self._handle = handle
            else:
                os.close(handle)

    def close(self) -> None:
        """Release the lock, so that `remove` may delete the directory or file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def in_use(path: Path) -> bool:
    """Return True if a running process holds the directory or file `path`."""
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
    """Return when a directory or a file was last used, or last modified if it has no stamp, in seconds since 1970."""
    with suppress(OSError):
        return _stamp(path).stat().st_mtime
    return path.stat().st_mtime


def remove(path: Path) -> bool:
    """Remove a directory or a file and its stamp. Return False, and remove nothing, if a running process holds it."""
    handle = os.open(_stamp(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        gone = path.with_name(f".{path.name}.removed.partial")  # hides the directory while it is only partly removed
        _stamp(path).unlink(missing_ok=True)
        path.rename(gone)
        erase(gone)
        return True
    finally:
        os.close(handle)


def _stamp(path: Path) -> Path:
    return path / STAMP if path.is_dir() else path.with_name(f".{path.name}{STAMP}")
