"""What the operating system says of this machine that more than one room asks for."""

import ctypes
import os
from contextlib import suppress


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def return_memory() -> None:
    """Give the system back what this process has freed, which glibc would keep."""
    with suppress(AttributeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
