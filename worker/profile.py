"""A description of this machine: its cores, memory and disk, and the memory that this process uses."""

import platform
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scheduler.free import default_budget
from tpi.net.fields import Card, MachineSpeed, Profile
from tpi.net.messages import NodeOptions
from tpi.system.machine import disk_free, usable_cores
from tpi.system.memory import resident_memory, total_memory
from tpi.system.private import make_private
from tpi.text import plain

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): set the peak to the memory that is resident now


def measure_machine(
    cache: Path, threads: int, memory_limit: int, card: Card | None = None, speed: MachineSpeed | None = None
) -> Profile:
    """Return the profile of the machine as it is now, for the master.

    Sizes are in bytes. `threads` 0 means all cores, `memory_limit` 0 all free memory. `card` describes the accelerators
    and `speed` the measured speeds; None without them.
    """
    cores = usable_cores()
    return Profile(
        host=plain(socket.gethostname(), 64),
        system=plain(f"{platform.system()} {platform.machine()}"),
        cores=cores,
        threads=threads or cores,
        memory_total=total_memory(),
        memory_free=default_budget(),
        memory_limit=memory_limit,
        process_bytes=rss(),
        disk_free=_disk_free(cache),
        card=card,
        speed=speed,
    )


def _disk_free(cache: Path) -> int:
    """Return the free bytes on the disk of the directory `cache`; 0 if the directory cannot be created."""
    try:
        make_private(cache)
        return disk_free(cache)
    except OSError:
        return 0


def memory_budget(profile: Profile) -> int:
    """Return the bytes that the node may use above its bare process: its --memory, or the memory that was free."""
    return profile.memory_limit or profile.memory_free


def limit_options(asked: NodeOptions, profile: Profile) -> NodeOptions:
    """Return the options that the master asked for, limited to the node's resources. Both sides plan with the result.

    In the result, memory (bytes) and threads are set. If no memory is free, memory is 1 byte, since 0 would let the
    node choose. With the scheduler `resident` a master may load more than is free, up to the node's
    --memory.
    """
    threads = min(asked.threads or profile.threads, profile.threads)
    if asked.scheduler == "resident":
        return replace(asked, memory=profile.memory_limit, threads=threads)
    memory = max(1, memory_budget(profile))
    return replace(asked, memory=min(asked.memory or memory, memory), threads=threads)


def rss() -> int:
    """Return the resident memory of this process in bytes."""
    return resident_memory()


def reset_peak() -> None:
    """Reset the peak that `peak_rss` returns, so that it covers one plan. This works only on Linux with /proc."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_rss() -> int:
    """Return the peak resident memory of this process since `reset_peak`, in bytes.

    Without /proc, the figure comes from getrusage and covers the whole life of the process.
    """
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
