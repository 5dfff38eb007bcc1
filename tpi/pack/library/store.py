"""Atomic creation of directories. One process at a time builds a hidden directory, syncs it, and renames it."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpi.config import cache_advice
from tpi.errors import WeightsError
from tpi.system.fulldisk import is_full, write_error
from tpi.system.private import FILE, FOLDER, make_private, private


def build(target: Path, fill: Callable[[Path], None], done: Callable[[Path], bool], overwrite: bool = False) -> None:
    """Create the directory `target` atomically: call `fill` with a new hidden directory, then rename that.

    If another process is building the same target, wait for it. If `done(target)` is True after that, do nothing. With
    `overwrite`, build in any case and replace the existing directory.

    Raises:
        WeightsError: if the disk is full, the directory cannot be written, or `target` holds something else.
    """
    with build_directory(target) as partial:
        if overwrite:
            fill(partial)
            _replace(target, partial)
        elif not done(target):
            if target.exists() and any(target.iterdir()):
                raise WeightsError(f"{target} holds files but is not complete; delete it or choose another directory")
            fill(partial)
            sync_directory(partial)
            partial.rename(target)


@contextmanager
def build_directory(target: Path) -> Iterator[Path]:
    """Lock `target` against other builders, and yield an empty hidden directory next to it to build in.

    Remains of interrupted runs are removed first. The hidden directory is removed at the end, unless the caller has
    renamed it. Leaving the context also syncs the parent directory, so that the rename survives a power failure.

    Raises:
        WeightsError: if the disk is full or cannot be written.
    """
    partial = _partial(target)
    try:
        make_private(target.parent)
        with _locked(_lock_file(target)):
            remove_partial(target.parent)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(FOLDER)
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            sync_directory(target.parent)
    except OSError as error:
        way_out = cache_advice(target) or "choose another place"
        raise write_error(
            error.filename or target, error, f"free space or {way_out}" if is_full(error) else way_out
        ) from error


def _replace(target: Path, made: Path) -> None:
    sync_directory(made)
    old = target.with_name(f".{target.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    made.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with open(path, "wb", opener=private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the directory's entries are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def erase(path: Path) -> None:
    """Remove a file or a directory. Errors are ignored, so parts of it may remain."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _lock_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path`, which exists only while it is locked.

    Yields True once the lock is held. Yields False if `wait` is False and another process holds it.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            yield False
            return
        except BaseException:
            os.close(handle)
            raise
        if _same_file(handle, path):
            break
        os.close(handle)  # the last holder removed it between open and lock
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def remove_partial(parent: Path) -> None:
    """Remove the partial directories that interrupted runs have left in `parent`: those that no process has locked."""
    for partial in parent.glob(".*.partial"):
        target = partial.with_name(partial.name[1 : -len(".partial")])
        if not _lock_file(target).exists():
            erase(partial)
            continue
        with _locked(_lock_file(target), wait=False) as free:
            if free:
                erase(partial)
