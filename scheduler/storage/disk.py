"""Disks: readers of byte ranges of files into page-aligned memory, past the page cache.

`scheduler.storage.tune` measures the best way to read a real disk. `read_chunk` repeats a failed read once, and turns
errors into messages for the user. `scheduler.window.loader` decides which thread reads what and when.
"""

import errno
import os
from pathlib import Path
from typing import Protocol

from scheduler.storage.extent import Extent
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import WeightsError
from tpi.system.openfiles import way_to_read

DEFAULT_CHUNK = 1 << 20  # bytes per read
DEFAULT_THREADS = 4  # reads in flight
_DIRECT = getattr(os, "O_DIRECT", 0)


class Disk(Protocol):
    """Reader of files into memory. Up to `threads` threads call `read` at once, for at most `chunk` bytes each."""

    chunk: int  # bytes, a multiple of PAGE
    threads: int

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read `into.size` bytes at `offset` into `into`.

        Return the number of bytes read, which is smaller at the end of the file.

        `offset` and `into.size` are multiples of `PAGE`, and `into` starts on a page boundary.

        Raises:
            OSError: if the operating system cannot read the file.
        """
        ...


class DirectDisk:
    """Files on a real disk, read with `O_DIRECT` or, if that is not supported, dropped from the page cache once read.

    Direct reads into memory that a driver has mapped fail with EFAULT; such memory is filled through the kernel's
    buffers.
    """

    def __init__(self, chunk: int = DEFAULT_CHUNK, threads: int = DEFAULT_THREADS, direct: bool = True) -> None:
        self.chunk = chunk
        self.threads = threads
        self.direct = direct and bool(_DIRECT)

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read `into.size` bytes at `offset` of a file, directly if possible; return the number of bytes read."""
        if self.direct:
            try:
                return _read_file(path, offset, into, _DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT):
                    raise
                if error.errno != errno.EFAULT:  # EFAULT concerns this memory only, not the file system
                    self.direct = False
        return _read_file(path, offset, into, 0)


def _read_file(path: Path, offset: int, into: Bytes, flag: int) -> int:
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | flag)) as file:
        done = 0
        while done < into.size:
            file.seek(offset + done)
            got = file.readinto(into[done:].data) or 0
            done += got
            if not got or (flag and done % PAGE):  # a direct read ends inside a page only at the end of the file
                break
        if not flag and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), offset, into.size, os.POSIX_FADV_DONTNEED)
        return done


def chunks_of(extent: Extent, chunk: int) -> range:
    """Return the offsets inside its slot at which the reads of an extent start, `chunk` bytes apart."""
    return range(0, extent.slot_bytes, chunk)


def read_chunk(disk: Disk, extent: Extent, slot: Bytes, start: int) -> int:
    """Read the chunk of `extent` that begins `start` bytes into its slot, with one retry; return its number of bytes.

    Raises:
        WeightsError: if the file is missing, too short or unreadable both times; the message names it.
    """
    stop = min(start + disk.chunk, extent.slot_bytes)
    needed = min(stop, extent.skew + extent.nbytes) - start
    try:
        return _attempt(disk, extent, slot[start:stop], start, needed)
    except (OSError, WeightsError):
        return _attempt_again(disk, extent, slot[start:stop], start, needed)


def read_extent(disk: Disk, extent: Extent, slot: Bytes) -> Bytes:
    """Read a whole extent into `slot` in the calling thread; return its bytes. Errors are those of `read_chunk`."""
    for start in chunks_of(extent, disk.chunk):
        read_chunk(disk, extent, slot, start)
    return extent.view(slot)


def _attempt(disk: Disk, extent: Extent, into: Bytes, start: int, needed: int) -> int:
    offset = extent.offset - extent.skew + start
    if disk.read(extent.path, offset, into) < needed:
        raise WeightsError(
            f"{extent.path} is shorter than {extent.offset + extent.nbytes} bytes; {_remedy(extent.path)}"
        )
    return needed


def _attempt_again(disk: Disk, extent: Extent, into: Bytes, start: int, needed: int) -> int:
    try:
        return _attempt(disk, extent, into, start, needed)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WeightsError(
            f"{extent.path} could not be read: {reason}; {way_to_read(error, _remedy(extent.path))}"
        ) from error


def _remedy(path: Path) -> str:
    """Return advice for a broken file of weights: a shard image is a copy of the master's, a pack is not."""
    if path.suffix == ".shard":
        return "remove it to fetch it again"
    return f"remove the pack {path.parent}; the next run makes it again if it is in the cache, else run `tpi pack`"
