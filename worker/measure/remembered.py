"""Measurements of this machine, stored in the cache with their date and conditions, and repeated after 30 days.

If a record cannot be read or written, the next start measures again.
"""

import json
import platform
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from scheduler.model.machine import Accelerator, DeviceLink, KvRates, Rates, laptop_gpu
from tpi import __version__
from tpi.devices.base import Device, identity_of, shares_memory
from tpi.kernels import Kernels
from tpi.system.atomic import write_atomically
from tpi.system.machine import usable_cores
from tpi.system.private import make_private
from worker.measure.machine import SAMPLES, free_memory, measure_device, measure_host, sample_sizes

_FILE = "machine.json"
_FRESH_S = 30 * 24 * 3600.0  # after which a machine is measured again: its drivers may have changed
_ODD = 2.0  # factor between prediction and run from which a measurement counts as wrong

T = TypeVar("T")


@dataclass(frozen=True)
class Remembered(Generic[T]):
    """A measurement, the time at which it was made, and the conditions under which it holds."""

    figures: T
    at: float  # seconds since 1970
    on: str  # the device and the system, as text
    doubted: bool = False  # True if a run has contradicted the figures

    @property
    def good(self) -> bool:
        """True if the figures can be used: at most 30 days old, not dated in the future, and not marked as doubted."""
        return 0 <= time.time() - self.at < _FRESH_S and not self.doubted


def host_rates(kernels: Kernels, cache: Path, remeasure: bool = False) -> Remembered[Rates]:
    """Return the rates of the host with as many threads as `kernels` has: remembered in `cache`, or measured now.

    A processor quota does not affect these rates. If `remeasure` is True, measure in any case.
    """
    on = f"{_system()}, {usable_cores()} cores, {kernels.threads()} threads, {kernels.isa()}"
    return _remembered(cache, f"threads {on}", on, _read_host, lambda: measure_host(kernels), remeasure)


def device_rates(device: Device, cache: Path, remeasure: bool = False) -> Remembered[Accelerator]:
    """Return the rates of a device and its free memory: remembered in `cache`, or measured now.

    A sample is as large as a quarter of the free memory allows, and rates are remembered for the size of the sample.
    Rates of larger samples are preferred, so that they do not depend on the memory that happens to be free. If no
    sample fits, the result has the rates of a laptop's graphics chip, which are not remembered. If `remeasure` is True,
    measure in any case.
    """
    on, room = f"{device.name} under {_system()}", free_memory(device)
    known_by = f"{identity_of(device)} under {_system()}"
    sizes, shared = sample_sizes(room), shares_memory(device)
    if not sizes:
        guessed = replace(laptop_gpu(), memory=room, name=device.name, shared=shared)
        return Remembered(guessed, time.time(), f"{on}, not measured")
    larger = [size for size in SAMPLES if size > sizes[0]]
    if remeasure:  # otherwise the next start would use old measurements with larger samples
        _forget(cache, {_key(known_by, size) for size in larger})
    found = next((one for size in reversed(larger) if (one := _known(cache, _key(known_by, size), on))), None)
    if found is None:
        measure = partial(measure_device, device, sizes[0])
        found = _remembered(cache, _key(known_by, sizes[0]), on, _read_device, measure, remeasure)
    return replace(found, figures=replace(found.figures, memory=room, name=device.name, shared=shared))


def _key(known_by: str, sample: int) -> str:
    return f"device {known_by}, tpi {__version__}, {sample >> 20} MiB at once"


def _known(cache: Path, key: str, on: str) -> Remembered[Accelerator] | None:
    """Return the measurement of a device under `key`; None if there is none, or if it is too old or doubted."""
    found = _read(_load(cache), key, on, _read_device)
    return found if found and found.good else None


def _forget(cache: Path, keys: Container[str]) -> None:
    _save(cache, {key: fields for key, fields in _load(cache).items() if key not in keys})


def contradicts(predicted: float, measured: float) -> bool:
    """Return True if `measured` and `predicted` seconds differ by more than a factor of 2, and `measured` is not 0."""
    return measured > 0 and not 1 / _ODD <= predicted / measured <= _ODD


def doubt_machine(cache: Path, before: float = inf) -> None:
    """Mark the remembered measurements as doubted, so that the next start measures again.

    Call this if a run contradicts the measurements. Measurements made at or after `before` (seconds since 1970) are
    not doubted, since a new measurement would give the same result.
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
    before = _read(known, key, on, read)
    if before and before.good and not remeasure:
        return before
    found = Remembered(measure(), time.time(), on)
    _save(cache, known | {key: asdict(found)})
    return found


def _read(
    known: dict[str, dict[str, Any]], key: str, on: str, read: Callable[[dict[str, Any]], T]
) -> Remembered[T] | None:
    """Return the record under `key`, converted by `read`; None if it is missing or damaged."""
    with suppress(KeyError, TypeError, ValueError):
        fields = known[key]
        return Remembered(read(fields["figures"]), float(fields["at"]), on, bool(fields["doubted"]))
    return None


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"


def _read_host(fields: dict[str, Any]) -> Rates:
    kv = KvRates(**fields["kv"])
    if min(asdict(kv).values()) <= 0:
        raise ValueError("the host's rate of attention is not positive")
    return replace(_read_rates({**fields, "kv": None}), kv=kv)


def _read_rates(fields: dict[str, Any]) -> Rates:
    return _positive(Rates(**fields))


def _read_device(fields: dict[str, Any]) -> Accelerator:
    rates, link = _read_rates(fields["rates"]), DeviceLink(**fields["link"])
    if min(link.up, link.down, link.piece) <= 0:
        raise ValueError("the link's rate is not positive")
    follow = None if fields["follow"] is None else float(fields["follow"])
    return Accelerator(rates, int(fields["memory"]), link, str(fields["name"]), follow=follow)


def _positive(rates: Rates) -> Rates:
    if min(rates.read, rates.operations) <= 0:
        raise ValueError("the device's rate is not positive")
    return rates


def _load(cache: Path) -> dict[str, dict[str, Any]]:
    try:
        known = json.loads((cache / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {key: fields for key, fields in known.items() if isinstance(fields, dict)} if isinstance(known, dict) else {}


def _save(cache: Path, known: dict[str, dict[str, Any]]) -> None:
    with suppress(OSError):
        make_private(cache)
        write_atomically(cache / _FILE, json.dumps(known, indent=1).encode())
