"""What the operating system says of this machine that more than one room asks for."""

import os
from contextlib import suppress
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def disk_free(path: Path) -> int:
    """Bytes that may still be written where `path` is, by who is not root.

    Raises:
        OSError: if there is no such file or directory.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def return_memory() -> None:
    """Give the system back what this process has freed, which glibc would keep."""
    import ctypes

    with suppress(AttributeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
