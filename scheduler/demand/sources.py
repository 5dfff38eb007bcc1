"""The tier below a demand cache: where units are loaded from, and how they get into its slots.

A large unit is read from disk directly into its slot, with one read. Small units that are neighbours on disk are read
together and then copied to their slots, because every read has a fixed cost.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import local
from typing import Protocol

import numpy as np

from scheduler.demand.policies import Key
from scheduler.slots.cache import Source
from scheduler.slots.shelf import Load
from scheduler.storage.disk import Disk, read_chunk
from scheduler.storage.extent import Extent
from tpi.devices.base import Device
from tpi.devices.pages import PAGE, Bytes, page_buffer, round_up

Verify = Callable[[int, Bytes], None]
ALONE = 256 << 10  # bytes: a unit of at least this size is read alone, and smaller ones are joined up to this size


class UnitTier(Protocol):
    """A source of units, numbered in the order of `keys`. Several threads use it."""

    @property
    def keys(self) -> Sequence[Key]:
        """Keys of all units, in the order of their numbers."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, which any unit fits into; whole pages if units are read directly into slots."""

    def nbytes(self, unit: int) -> int:
        """Return the size of a unit in bytes."""

    def joins(self, unit: int, other: int, together: int) -> bool:
        """Return True if `other` should be read together with `unit`, the last unit of a read of `together` bytes."""

    def view(self, unit: int, slot: Bytes) -> Bytes:
        """Return the part of `slot` that holds the unit's bytes."""

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """Fill `slots` with `units`, which are read together; return the number of bytes that were moved.

        Raises:
            WeightsError: if `units` cannot be read; other errors are raised as they are.
        """


class DiskUnits:
    """A `UnitTier` of byte ranges of files."""

    def __init__(self, disk: Disk, extents: Mapping[Key, Extent], alone: int = ALONE) -> None:
        """Create a source of `extents`, in the order of the units' numbers.

        A unit of at least `alone` bytes is read by itself; smaller ones are read together, up to that size.
        """
        self._alone = alone
        self.keys = list(extents)
        self._extents = list(extents.values())
        self._disk = _Whole(disk)
        self.threads = disk.threads  # number of reads that the disk takes at once
        smallest = min((extent.nbytes for extent in self._extents), default=0)
        self.staging_bytes = 0 if smallest >= alone else self._most_together() + PAGE  # bytes per thread
        self.slot_bytes = self._slot_bytes()
        self._threads = local()

    def nbytes(self, unit: int) -> int:
        """Return the size of a unit in bytes."""
        return self._extents[unit].nbytes

    def joins(self, unit: int, other: int, together: int) -> bool:
        """Return True if both units are small, `other` follows `unit` in one file, and a read of both is not too
        long.
        """
        one, two = self._extents[unit], self._extents[other]
        follows = one.path == two.path and one.offset + one.nbytes == two.offset
        return bool(self.staging_bytes) and follows and together + two.nbytes <= self._alone

    def view(self, unit: int, slot: Bytes) -> Bytes:
        """Return the part of `slot` that holds the unit's bytes."""
        extent = self._extents[unit]
        return slot[: extent.nbytes] if self.staging_bytes else extent.view(slot)

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """Read units into their slots; return the number of bytes that were read.

        Raises:
            WeightsError: if the file is missing, too short or unreadable at two attempts; names the file.
        """
        extents = [self._extents[unit] for unit in units]
        run = Extent(extents[0].path, extents[0].offset, sum(extent.nbytes for extent in extents))
        into = self._staging()[: run.slot_bytes] if self.staging_bytes else slots[0][: run.slot_bytes]
        if run.nbytes:
            read_chunk(self._disk, run, into, 0)
        if self.staging_bytes:
            data, end = run.view(into), 0
            for extent, slot in zip(extents, slots, strict=True):
                begin, end = end, end + extent.nbytes
                slot[: extent.nbytes] = data[begin:end]
        return run.slot_bytes

    def _staging(self) -> Bytes:
        if not hasattr(self._threads, "staging"):
            self._threads.staging = page_buffer(self.staging_bytes)
        staging: Bytes = self._threads.staging
        return staging

    def _most_together(self) -> int:
        return round_up(max(self._alone, *(extent.nbytes for extent in self._extents), 0)) + PAGE

    def _slot_bytes(self) -> int:
        if self.staging_bytes:
            return -(-max(extent.nbytes for extent in self._extents) // 64) * 64 if self._extents else 0
        return max(extent.slot_bytes for extent in self._extents)


class HostUnits:
    """A `UnitTier` of units in the host's memory, resident or in another cache, that are copied to a device."""

    def __init__(
        self, device: Device, holds: Mapping[Key, AbstractContextManager[Bytes]], sizes: Sequence[int]
    ) -> None:
        """Create a source of units; entering a unit's context of `holds` yields its bytes, of size `sizes[unit]`."""
        self.keys = list(holds)
        self._device, self._holds, self._sizes = device, list(holds.values()), sizes
        self.slot_bytes = round_up(max(sizes, default=0))

    def nbytes(self, unit: int) -> int:
        """Return the size of a unit in bytes."""
        return self._sizes[unit]

    def joins(self, unit: int, other: int, together: int) -> bool:
        """Return False: each unit is copied by itself."""
        return False

    def view(self, unit: int, slot: Bytes) -> Bytes:
        """Return the part of `slot` that holds the unit's bytes."""
        return slot[: self._sizes[unit]]

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """Copy units into their slots; return the number of bytes that were copied.

        Raises:
            DeviceError: if a copy failed; other errors are raised as they are.
        """
        for unit, slot in zip(units, slots, strict=True):
            with self._holds[unit] as data:
                self._device.copy(data, self.view(unit, slot)).wait()
        return sum(self._sizes[unit] for unit in units)


class Verified(Source):
    """A source that fills slots from a `UnitTier`, and compares each unit with its hash when it is first loaded."""

    def __init__(self, tier: UnitTier, slots: Sequence[Bytes], verify: Verify | None) -> None:
        """Fill `slots` from `tier`; `verify(unit, data)` raises if the bytes are wrong. None: nothing is compared."""
        self._tier, self._slots, self._verify = tier, slots, verify
        self.checks = verify is not None
        self._unverified = np.full(len(tier.keys), self.checks)

    def joins(self, loads: Sequence[Load], other: Load) -> bool:
        """Return True if the unit of `other` should be read together with the units of `loads`."""
        nbytes = self._tier.nbytes
        last, new = int(loads[-1].units[0]), int(other.units[0])
        return self._tier.joins(last, new, sum(nbytes(int(load.units[0])) for load in loads))

    def fill(self, loads: Sequence[Load], part: int) -> int:
        """Load one unit for each of `loads`. Errors are those of `UnitTier.fill`."""
        units = [int(load.units[0]) for load in loads]
        return self._tier.fill(units, [self._slots[int(load.slots[0])] for load in loads])

    def check(self, load: Load) -> None:
        """Verify a unit at its first load; if its bytes are wrong, load and verify it once more."""
        unit, slot = int(load.units[0]), self._slots[int(load.slots[0])]
        if self._verify is None or not self._unverified[unit]:
            return
        data = self._tier.view(unit, slot)
        try:
            self._verify(unit, data)
        except Exception:  # noqa: BLE001 - the read may have been at fault
            self._tier.fill([unit], [slot])
            self._verify(unit, data)
        self._unverified[unit] = False


class _Whole:
    """A disk without a limit on the size of a read, so that `read_chunk` reads a whole extent at once."""

    chunk = 1 << 62

    def __init__(self, disk: Disk) -> None:
        self.threads = disk.threads
        self._disk = disk

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        return self._disk.read(path, offset, into)
