"""What memory the machine has, and how much of it this process holds. Bytes.

Linux says so itself in /proc; elsewhere psutil does, which is loaded only there: it takes a megabyte and a half.
"""

import os
import sys
from pathlib import Path

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


def _meminfo(name: str) -> int:
    """A line of /proc/meminfo, which counts in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo has no line {name}")
