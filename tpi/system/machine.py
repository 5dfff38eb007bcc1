"""Facts about this machine from the operating system: cores and disk space; and returning freed memory to it."""

import os
from contextlib import suppress
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def disk_free(path: Path) -> int:
    """Return the bytes that users other than root may still write on the disk of `path`.

    Raises:
        OSError: if there is no such file or directory.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def return_memory() -> None:
    """Return freed memory to the system. Otherwise glibc would keep it for this process."""
    import ctypes

    with suppress(AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
