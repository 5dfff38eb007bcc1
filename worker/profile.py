"""What this machine says of itself: cores, memory, disk, and what this process takes of them."""

import os
import platform
import shutil
import socket
from pathlib import Path

import psutil

from tpi.messages import Profile


def measure(cache: Path, threads: int, memory_limit: int) -> Profile:
    """The machine as it is now. `threads` 0 means all cores; sizes in bytes."""
    memory = psutil.virtual_memory()
    cores = usable_cores()
    return Profile(
        host=socket.gethostname()[:64],
        system=f"{platform.system()} {platform.machine()}",
        cores=cores,
        threads=threads or cores,
        memory_total=memory.total,
        memory_free=memory.available,
        memory_limit=memory_limit,
        process_bytes=rss(),
        disk_free=shutil.disk_usage(cache).free,
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rss() -> int:
    """Memory that this process has resident now, in bytes."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def peak_rss() -> int:
    """The most memory that this process ever had resident, in bytes (VmHWM; getrusage where there is no /proc)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
