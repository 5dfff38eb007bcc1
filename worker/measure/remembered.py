"""What was measured of this machine, in the cache: with its date and what it was measured on, until it is too old.

A record that cannot be read, or written, costs a measurement at the next start and nothing else.
"""

import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from scheduler.model.machine import Accelerator, DeviceLink, Rates
from tpi.devices.base import Device
from tpi.kernels import Kernels
from tpi.system.atomic import write_atomically
from tpi.system.machine import usable_cores
from worker.measure.machine import measure_device, measure_host

_FILE = "machine.json"
_FRESH_S = 30 * 24 * 3600.0  # after which a machine is measured again: drivers change, and it ages
_ODD = 2.0  # times slower or faster than predicted: what was measured is no longer so

T = TypeVar("T")


@dataclass(frozen=True)
class Remembered(Generic[T]):
    """Figures, when they were measured in seconds since 1970, and on what."""

    figures: T
    at: float
    on: str
    doubted: bool = False  # a run contradicted them since

    @property
    def good(self) -> bool:
        """Whether they may be relied upon: neither old nor doubted, nor of a time to come."""
        return 0 <= time.time() - self.at < _FRESH_S and not self.doubted


def host_rates(kernels: Kernels, cache: Path, remeasure: bool = False) -> Remembered[Rates]:
    """What the host's threads compute with these kernels, if no quota stops them: remembered, or measured now."""
    on = f"{_system()}, {usable_cores()} cores, {kernels.threads()} threads, {kernels.isa()}"
    return _remembered(cache, f"threads {on}", on, _read_rates, lambda: measure_host(kernels), remeasure)


def device_rates(device: Device, cache: Path, remeasure: bool = False) -> Remembered[Accelerator]:
    """What a device does, with the memory that it has free now: remembered in `cache`, or measured now."""
    on = f"{device.name} under {_system()}"
    found = _remembered(cache, f"device {on}", on, _read_device, lambda: measure_device(device), remeasure)
    limit = device.memory.limit
    room = found.figures.memory if limit is None else max(0, limit - device.memory.used)
    return replace(found, figures=replace(found.figures, memory=room))


def contradicts(predicted: float, measured: float) -> bool:
    """Whether a run that took `measured` seconds, where `predicted` were expected, says that the figures are wrong."""
    return measured > 0 and not 1 / _ODD <= predicted / measured <= _ODD


def doubt_machine(cache: Path, before: float = inf) -> None:
    """A run contradicted what is remembered: the next start measures it all again.

    What was measured since `before`, in seconds since 1970, is not doubted: it would be measured as it was just now.
    """
    known = _load(cache)
    _save(cache, {key: {**fields, "doubted": _measured_at(fields) < before} for key, fields in known.items()})


def _measured_at(fields: dict[str, Any]) -> float:
    at = fields.get("at")
    return float(at) if isinstance(at, int | float) else 0.0


def _remembered(
    cache: Path, key: str, on: str, read: Callable[[dict[str, Any]], T], measure: Callable[[], T], remeasure: bool
) -> Remembered[T]:
    known = _load(cache)
    with suppress(KeyError, TypeError, ValueError):
        fields = known[key]
        found = Remembered(read(fields["figures"]), float(fields["at"]), on, bool(fields["doubted"]))
        if found.good and not remeasure:
            return found
    found = Remembered(measure(), time.time(), on)
    _save(cache, known | {key: asdict(found)})
    return found


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"


def _read_rates(fields: dict[str, Any]) -> Rates:
    return _positive(Rates(**fields))


def _read_device(fields: dict[str, Any]) -> Accelerator:
    rates, link = _read_rates(fields["rates"]), DeviceLink(**fields["link"])
    if min(link.up, link.down, link.piece) <= 0:
        raise ValueError("a link that moves nothing")
    return Accelerator(rates, int(fields["memory"]), link, str(fields["name"]))


def _positive(rates: Rates) -> Rates:
    if min(rates.read, rates.operations) <= 0:
        raise ValueError("a device that computes nothing")
    return rates


def _load(cache: Path) -> dict[str, dict[str, Any]]:
    try:
        known = json.loads((cache / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {key: fields for key, fields in known.items() if isinstance(fields, dict)} if isinstance(known, dict) else {}


def _save(cache: Path, known: dict[str, dict[str, Any]]) -> None:
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_atomically(cache / _FILE, json.dumps(known, indent=1).encode())
