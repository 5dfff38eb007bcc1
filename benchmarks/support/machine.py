"""The machine in one line, and figures of a process."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


def describe() -> str:
    """Processor, cores, instruction set, memory and system."""
    from tpi.devices.host import open_host

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{_processor()}, {cores} cores ({open_host().kernels.isa()} kernels), {memory:.0f} GiB, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def status_bytes(pid: int | str, field: str) -> int:
    """A field of /proc/PID/status that is in kB, such as VmRSS or VmHWM, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


@dataclass
class Neighbours:
    """What other processes, and other guests of the host, take of the processors' time while something is measured."""

    _started: tuple[float, float, float] = field(default_factory=lambda: (time.monotonic(), _busy_s(), _own_s()))

    def share(self) -> float:
        """Their part of all processors' time since this was made; children count as own once they have ended."""
        begun, busy, own = self._started
        others = (_busy_s() - busy) - (_own_s() - own)
        return max(0.0, others) / (len(os.sched_getaffinity(0)) * (time.monotonic() - begun))


def _busy_s() -> float:
    """Seconds that all processors spent on processes, stolen ones included; interrupts are mostly of own messages."""
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:4])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
