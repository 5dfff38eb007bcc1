"""How fast this machine is for those who plan with it: remembered, or measured now, within its quota of the cores."""

from pathlib import Path

from scheduler.storage.tune import known_speed
from tpi.kernels import Kernels
from tpi.net.fields import MachineSpeed
from tpi.system.machine import usable_cores
from tpi.system.quota import allowed_cores
from worker.measure.remembered import host_rates
from worker.plan.speeds import OF_DISK


def machine_speed(kernels: Kernels, threads: int, cache: Path, remeasure: bool = False) -> MachineSpeed:
    """What this machine computes with so many threads (0: all cores); and its disk, if a run has measured that.

    A short measurement does not feel a quota of processor time, which is taken off what was measured.
    """
    kernels.set_threads(threads or usable_cores())
    rates = host_rates(kernels, cache, remeasure).figures
    part = min(1.0, allowed_cores() / kernels.threads())
    return MachineSpeed(part * rates.read, part * rates.operations, OF_DISK * known_speed(cache, cache))
