"""The tier below a demand cache: where units come from, and how they get into its slots.

Large units are read from disk one by one, each with one read and straight into its slot. Small ones would keep a disk
busy with beginnings, so neighbours that are wanted together are read as one, and copied apart.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import local
from typing import Protocol

from scheduler.demand.policies import Key
from scheduler.storage.disk import Disk, read_chunk
from scheduler.storage.extent import Extent
from tpi.devices.base import Device
from tpi.devices.pages import PAGE, Bytes, page_buffer, round_up

ALONE = 256 << 10  # bytes from which on a unit is a read of its own, and that others are joined up to


class UnitTier(Protocol):
    """Units by their number, in the order of `keys`. Used by several threads."""

    @property
    def keys(self) -> Sequence[Key]:
        """Of all units, in the order of their numbers."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that any of them takes; whole pages where they are read straight into it."""

    def nbytes(self, unit: int) -> int:
        """Bytes of a unit."""

    def joins(self, unit: int, other: int, together: int) -> bool:
        """Whether `other` should be loaded with `unit` and those before it, which are `together` bytes."""

    def view(self, unit: int, slot: Bytes) -> Bytes:
        """The unit's bytes in its slot."""

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """UnitLoad units that were joined into their slots; returns the bytes that moved.

        Raises:
            WeightsError: or whatever else it failed with.
        """


class DiskUnits:
    """Units that are extents of files."""

    def __init__(self, disk: Disk, extents: Mapping[Key, Extent], alone: int = ALONE) -> None:
        """`extents` has the units in the order of their numbers; reads of `alone` bytes are long enough."""
        self._alone = alone
        self.keys = list(extents)
        self._extents = list(extents.values())
        self._disk = _Whole(disk)
        smallest = min((extent.nbytes for extent in self._extents), default=0)
        self.staging_bytes = 0 if smallest >= alone else self._most_together() + PAGE  # for each thread
        self.slot_bytes = self._slot_bytes()
        self._threads = local()

    def nbytes(self, unit: int) -> int:
        """See `UnitTier.nbytes`."""
        return self._extents[unit].nbytes

    def joins(self, unit: int, other: int, together: int) -> bool:
        """See `UnitTier.joins`: small units that follow one another in a file, up to a read's size."""
        one, two = self._extents[unit], self._extents[other]
        follows = one.path == two.path and one.offset + one.nbytes == two.offset
        return bool(self.staging_bytes) and follows and together + two.nbytes <= self._alone

    def view(self, unit: int, slot: Bytes) -> Bytes:
        """See `UnitTier.view`."""
        extent = self._extents[unit]
        return slot[: extent.nbytes] if self.staging_bytes else extent.view(slot)

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """See `UnitTier.fill`.

        Raises:
            WeightsError: if the file is missing, short or unreadable, twice; names it.
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
        """Memory of the calling thread."""
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
    """Units in the host's memory, on their way to a device: bytes that stay, or another cache's."""

    def __init__(
        self, device: Device, holds: Mapping[Key, AbstractContextManager[Bytes]], sizes: Sequence[int]
    ) -> None:
        """`holds` gives the bytes of each unit, `sizes` says how many they are."""
        self.keys = list(holds)
        self._device, self._holds, self._sizes = device, list(holds.values()), sizes
        self.slot_bytes = round_up(max(sizes, default=0))

    def nbytes(self, unit: int) -> int:
        """See `UnitTier.nbytes`."""
        return self._sizes[unit]

    def joins(self, unit: int, other: int, together: int) -> bool:
        """See `UnitTier.joins`: a copy each."""
        return False

    def view(self, unit: int, slot: Bytes) -> Bytes:
        """See `UnitTier.view`."""
        return slot[: self._sizes[unit]]

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """See `UnitTier.fill`.

        Raises:
            DeviceError: or whatever else a copy failed with.
        """
        for unit, slot in zip(units, slots, strict=True):
            with self._holds[unit] as data:
                self._device.copy(data, self.view(unit, slot)).wait()
        return sum(self._sizes[unit] for unit in units)


class _Whole:
    """A disk that reads whole extents at once."""

    chunk = 1 << 62

    def __init__(self, disk: Disk) -> None:
        self.threads = disk.threads
        self._disk = disk

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """See `scheduler.storage.disk.Disk`."""
        return self._disk.read(path, offset, into)
