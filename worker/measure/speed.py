"""The speed of this machine for planning: remembered or measured now, and reduced to its processor quota."""

from dataclasses import replace
from math import ceil
from pathlib import Path

from scheduler.model.machine import DiskRate, Rates
from scheduler.storage.tune import disk_for, known_speed
from tpi.config import default_cache
from tpi.kernels import Kernels
from tpi.net.fields import MachineSpeed
from tpi.system.machine import usable_cores
from tpi.system.quota import allowed_cores
from worker.measure.remembered import Remembered, host_rates
from worker.plan.speeds import OF_DISK


def host_rates_allowed(kernels: Kernels, cache: Path, remeasure: bool = False) -> Remembered[Rates]:
    """Return the rates of the host within this process's current processor quota: remembered, or measured now.

    The measurement uses as many threads as the quota can keep busy. If `remeasure` is True, measure in any case.
    """
    wanted, allowed = kernels.threads(), allowed_cores()
    busy = min(wanted, max(1, ceil(allowed)))
    kernels.set_threads(busy)
    try:
        found = host_rates(kernels, cache, remeasure)
    finally:
        kernels.set_threads(wanted)
    part, rates = min(1.0, allowed / busy), found.figures
    kv = rates.kv.scaled(part) if rates.kv else None
    return replace(found, figures=Rates(part * rates.read, part * rates.operations, rates.start, kv))


def disk_rate(cache: Path) -> DiskRate | None:
    """Return how fast the disk of `cache` is read while all cores compute; measure it if it is not known.

    Return None if the cache has too few files to measure with.
    """
    files = [*(cache / "packs").glob("*/*.safetensors"), *(cache / "shards").glob("*/*.shard")]
    found = disk_for(sorted(files), cache).bytes_per_second
    return DiskRate(OF_DISK * found) if found else None


def machine_speed(kernels: Kernels, threads: int, cache: Path, remeasure: bool = False) -> MachineSpeed:
    """Return the speed of this machine with `threads` threads (0: all cores), and of its disk if that is known."""
    kernels.set_threads(threads or usable_cores())
    rates = host_rates_allowed(kernels, cache, remeasure).figures
    return MachineSpeed(rates.read, rates.operations, known_disk(cache))


def known_disk(cache: Path) -> float:
    """Return the bytes per second at which the disk of `cache` is read while all cores compute; 0 if not known yet.

    The speed is looked up in `cache` and then in the user's cache, in which runs record it.
    """
    return OF_DISK * (known_speed(cache, cache) or known_speed(cache, default_cache()))
