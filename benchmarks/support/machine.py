"""The machine in one line, and figures of a process."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


def describe() -> str:
    """Describe the processor, cores, instruction set, memory and system."""
    from tpi.devices.host import open_host

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{_processor()}, {cores} cores ({open_host().kernels.isa()} kernels), {memory:.0f} GiB, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def status_bytes(pid: int | str, field: str) -> int:
    """Return a field of /proc/PID/status that is in kB, such as VmRSS or VmHWM, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


@dataclass
class Neighbours:
    """Processor time that other processes, and other guests of the host, take during a measurement."""

    _started: tuple[float, float, float] = field(default_factory=lambda: (time.monotonic(), _busy_s(), _own_s()))

    def share(self) -> float:
        """Return the share of all processors' time that others took since this object was created.

        A child process does not count as another process once it has ended.
        """
        begun, busy, own = self._started
        others = (_busy_s() - busy) - (_own_s() - own)
        return max(0.0, others) / (len(os.sched_getaffinity(0)) * (time.monotonic() - begun))


def _busy_s() -> float:
    """Return the seconds that all processors have worked, including stolen time but not the handling of interrupts."""
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:4])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
