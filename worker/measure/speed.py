"""How fast this machine is for those who plan with it: remembered, or measured now, within its quota of the cores."""

from dataclasses import replace
from math import ceil
from pathlib import Path

from scheduler.model.machine import DiskRate, Rates
from scheduler.storage.tune import disk_for, known_speed
from tpi.kernels import Kernels
from tpi.net.fields import MachineSpeed
from tpi.system.machine import usable_cores
from tpi.system.quota import allowed_cores
from worker.measure.remembered import Remembered, host_rates
from worker.plan.speeds import OF_DISK


def host_rates_allowed(kernels: Kernels, cache: Path, remeasure: bool = False) -> Remembered[Rates]:
    """As `worker.measure.remembered.host_rates`, within this process's quota of processor time as it is now.

    It is measured with as many threads as the quota keeps busy; more of them would take turns.
    """
    wanted, allowed = kernels.threads(), allowed_cores()
    busy = min(wanted, max(1, ceil(allowed)))
    kernels.set_threads(busy)
    try:
        found = host_rates(kernels, cache, remeasure)
    finally:
        kernels.set_threads(wanted)
    part, rates = min(1.0, allowed / busy), found.figures
    kv = rates.kv.times(part) if rates.kv else None
    return replace(found, figures=Rates(part * rates.read, part * rates.operations, rates.start, kv))


def disk_rate(cache: Path) -> DiskRate | None:
    """How fast the disk that `cache` is on is read beside computing; None while it has too little to measure by."""
    files = [*(cache / "packs").glob("*/*.safetensors"), *(cache / "shards").glob("*/*.shard")]
    found = disk_for(sorted(files), cache).bytes_per_second
    return DiskRate(OF_DISK * found) if found else None


def machine_speed(kernels: Kernels, threads: int, cache: Path, remeasure: bool = False) -> MachineSpeed:
    """What this machine computes with so many threads (0: all cores); and its disk, if a run has measured that."""
    kernels.set_threads(threads or usable_cores())
    rates = host_rates_allowed(kernels, cache, remeasure).figures
    return MachineSpeed(rates.read, rates.operations, OF_DISK * known_speed(cache, cache))
