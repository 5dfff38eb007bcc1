"""What memory the machine has, and how much of it this process holds. Bytes.

Linux says so itself in /proc; elsewhere psutil does, which is loaded only there: it takes a megabyte and a half.
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
    """Of the machine."""
    if _LINUX:
        return _meminfo("MemTotal")
    import psutil

    total: int = psutil.virtual_memory().total
    return total


def available_memory() -> int:
    """What programs can get without pushing others out."""
    if _LINUX:
        return _meminfo("MemAvailable")
    import psutil

    available: int = psutil.virtual_memory().available
    return available


def resident_memory() -> int:
    """What this process has resident now."""
    if _LINUX:
        pages = Path("/proc/self/statm").read_text().split()[1]  # proc(5): size, resident, ...
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    resident: int = psutil.Process().memory_info().rss
    return resident


def address_space() -> int | None:
    """Return how many bytes of address space this process may still take (`ulimit -v`); None: no limit is known."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not _LINUX:
        return None
    pages = Path("/proc/self/statm").read_text().split()[0]
    return max(0, limit - int(pages) * os.sysconf("SC_PAGE_SIZE"))


@contextmanager
def exhaustion_named() -> Iterator[None]:
    """Turn what the system refuses for lack of memory, threads included, into a TpiError that says what to do."""
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
    """A line of /proc/meminfo, which counts in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo has no line {name}")
