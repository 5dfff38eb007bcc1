"""Directories and files that are in use: a stamp in or beside each, touched for the last use, locked while it lasts."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

STAMP = ".used"


class Hold:
    """The use of a directory until it is closed: nobody removes it so long. Its last use is now."""

    def __init__(self, directory: Path, wanted: bool = True) -> None:
        """A directory that is gone, or that cannot be written, where nobody removes anything, is not held."""
        self._handle: int | None = None
        while wanted and self._handle is None:
            try:
                handle = os.open(directory / STAMP, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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


def in_use(directory: Path) -> bool:
    """Whether a running process uses a directory."""
    try:
        handle = os.open(directory / STAMP, os.O_RDONLY | os.O_CLOEXEC)
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
    """When a directory, or a file with a stamp beside it, was last used; when it was made, if nobody knows."""
    stamp = path / STAMP if path.is_dir() else _beside(path)
    with suppress(OSError):
        return stamp.stat().st_mtime
    return path.stat().st_mtime


def touch(file: Path) -> None:
    """Remember that a file is used now; a disk that cannot be written forgets it."""
    with suppress(OSError):
        _beside(file).touch()


def remove(path: Path) -> bool:
    """Remove a directory, or a file and its stamp; False if a running process uses it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        _beside(path).unlink(missing_ok=True)
        return True
    handle = os.open(path / STAMP, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        (path / STAMP).unlink(missing_ok=True)
        gone = path.with_name(f".{path.name}.removed.partial")  # what is half removed is never seen
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    finally:
        os.close(handle)


def _beside(file: Path) -> Path:
    return file.with_name(f".{file.name}{STAMP}")
