"""Memory of the machine and of this process, in bytes.

On Linux the numbers come from /proc. Other systems use psutil, which is imported only there: it takes 1.5 MB.
"""

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpi.errors import TpiError

_LINUX = sys.platform == "linux"


def total_memory() -> int:
    """Return the machine's memory in bytes."""
    if _LINUX:
        return _meminfo("MemTotal")
    import psutil

    total: int = psutil.virtual_memory().total
    return total


def available_memory() -> int:
    """Return the bytes that programs can allocate without swapping."""
    if _LINUX:
        return _meminfo("MemAvailable")
    import psutil

    available: int = psutil.virtual_memory().available
    return available


def resident_memory() -> int:
    """Return the resident set size of this process in bytes."""
    if _LINUX:
        pages = Path("/proc/self/statm").read_text().split()[1]  # proc(5): size, resident, ...
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    resident: int = psutil.Process().memory_info().rss
    return resident


def address_space() -> int | None:
    """Return the bytes of address space that this process may still map (`ulimit -v`); None if no limit is known."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not _LINUX:
        return None
    pages = Path("/proc/self/statm").read_text().split()[0]
    return max(0, limit - int(pages) * os.sysconf("SC_PAGE_SIZE"))


@contextmanager
def explain_exhaustion() -> Iterator[None]:
    """Turn errors from a lack of memory or threads within the block into a TpiError that says what to do."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        lacking = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if not lacking and str(error) != "can't start new thread":
            raise
        raise TpiError(
            "this process gets no more memory or threads; free memory, or raise its limits (ulimit -v, ulimit -u, a "
            "container's)"
        ) from error


def _meminfo(name: str) -> int:
    """Return the value `name` of /proc/meminfo in bytes; the file states it in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo has no line {name}")
