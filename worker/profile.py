"""What this machine says of itself: cores, memory, disk, and what this process takes of them."""

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
_RESET_PEAK = "5"  # proc(5): set the peak to what is resident now


def measure_machine(
    cache: Path, threads: int, memory_limit: int, card: Card | None = None, speed: MachineSpeed | None = None
) -> Profile:
    """The machine as it is now. `threads` 0 means all cores, `memory_limit` 0 what is free; sizes in bytes."""
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
    """Bytes free where the cache is, which is made again if it went away; 0 if it cannot be."""
    try:
        make_private(cache)
        return disk_free(cache)
    except OSError:
        return 0


def memory_budget(profile: Profile) -> int:
    """Bytes that the node may use above its bare process: its --memory, or what it found free."""
    return profile.memory_limit or profile.memory_free


def limited(asked: NodeOptions, profile: Profile) -> NodeOptions:
    """The master's wishes within what the node said of itself, so that both of them plan with the same.

    Neither memory (bytes) nor threads are left open; no memory at all is 1 byte, since 0 would ask for a choice. A
    master without scheduler may load more than is free, but what the node's owner lends with --memory binds it too.
    """
    threads = min(asked.threads or profile.threads, profile.threads)
    if asked.scheduler == "resident":
        return replace(asked, memory=profile.memory_limit, threads=threads)
    memory = max(1, memory_budget(profile))
    return replace(asked, memory=min(asked.memory or memory, memory), threads=threads)


def rss() -> int:
    """Memory that this process has resident now, in bytes."""
    return resident_memory()


def reset_peak() -> None:
    """Forget the peak so far, where the system lets us (Linux, /proc writable): `peak_rss` is of one plan then."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_rss() -> int:
    """The most memory that this process had resident since `reset_peak`, in bytes.

    VmHWM; where there is no /proc getrusage, whose figure is since the process began.
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
