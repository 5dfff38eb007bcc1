"""A cache of units in equal slots of one piece of memory, filled from the tier below on demand.

    with cache.hold(keys) as data:      # waits until all are loaded; data is their bytes, in the order of the keys
    with cache.follow(keys) as units:   # yields them one after the other, as each is loaded
    with cache.groups(keys) as groups:  # yields as many at once as there is room for
    held = cache.share(keys, choose)    # the loaded units, and as many of the others as `choose` says
    cache.expect(keys)                  # a hint: read ahead while the tier below is idle

The rules of holds, loads and failures are those of `scheduler.slots.cache.SlotCache`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from scheduler.demand.choice.replay import Recording
from scheduler.demand.iterators import GroupIterator, UnitIterator
from scheduler.demand.loads import IdleGaps, IdleTime
from scheduler.demand.policies import Key, Policy
from scheduler.demand.shared import ChooseCount, SharedHold
from scheduler.demand.shelf import UnitShelf
from scheduler.demand.sources import UnitTier, Verified, Verify
from scheduler.demand.stats import DemandStats
from scheduler.slots.cache import SlotCache
from scheduler.slots.stats import ReadClock
from scheduler.slots.table import Units
from scheduler.slots.workers import LoadWorkers
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.errors import PlanError
from tpi.trace import OFF, NoTrace

RECORDED = 256  # first steps whose uses are recorded, to compare policies


class DemandCache:
    """A cache of units (experts or neurons). One thread at a time may hold units.

    With a `device`, released units stay until the calls that are queued on it have ended.
    """

    def __init__(
        self,
        source: UnitTier,
        memory: Bytes,
        policy: Policy,
        workers: LoadWorkers,
        *,
        device: Device | None = None,
        verify: Verify | None = None,
        reads: ReadClock | None = None,
        trace: NoTrace = OFF,
        clock: Callable[[], float] = time.perf_counter,
        idle: IdleTime | None = None,
    ) -> None:
        """Create a cache with slots of `source.slot_bytes` bytes in `memory` (page-aligned for large units of a disk).

        Args:
            policy: the eviction policy; it knows units by their numbers in `source`.
            verify: called as `verify(unit, data)` at a unit's first load. If it raises, the unit is read once more.
            reads: the clock of another reader of the same disk.
            clock: returns seconds; measures the idle times of the tier below, unless `idle` estimates them.

        Raises:
            PlanError: if `memory` does not hold one unit.
        """
        if memory.size < source.slot_bytes:
            raise PlanError(
                f"a unit does not fit into {memory.size} bytes; give the cache at least {source.slot_bytes} bytes"
            )
        size = source.slot_bytes
        self._device, self._source = device, source
        self._slots = [memory[at : at + size] for at in range(0, memory.size - size + 1, size)] if size else []
        self._number = {key: number for number, key in enumerate(source.keys)}
        self._blocks = np.array([block for block, _ in source.keys], np.int64)
        self._recorded: list[list[Units]] = []
        self._counted: DemandStats | None = None  # the counts at the end of the recording
        self.shelf = UnitShelf(source, len(self._slots), policy, idle or IdleGaps(clock))
        self.slots = SlotCache(
            Verified(source, self._slots, verify),
            workers,
            self.shelf.counts,
            reads=reads or ReadClock(),
            trace=trace,
            devices=[] if device is None else [device],
            spare=self.shelf.spare,
        )

    @property
    def capacity(self) -> int:
        """Number of units that the cache has room for."""
        return len(self.shelf.table)

    def group_size(self, units: int) -> int:
        """Return how many units `groups` holds at once if it is given `units` units.

        If not all fit, the result is half of the cache: one half is loaded while the other is used.
        """
        return max(1, units if units <= self.capacity else self.capacity // 2)

    def begin(self) -> None:
        """Begin a step of the eviction policy, of the recording and of the statistics."""
        with self.slots.lock:
            if len(self._recorded) < RECORDED:
                self._recorded.append([])
            elif self._counted is None:
                self._counted = self.shelf.counts.copy()
            self.shelf.policy.begin()
            self.shelf.counts.steps += 1

    @contextmanager
    def hold(self, keys: Sequence[Key]) -> Iterator[list[Bytes]]:
        """Hold all of `keys`, which are distinct and of one block; yield their bytes, 1-D uint8, in that order.

        Raises:
            WeightsError: if a unit cannot be loaded; names the file. Other errors of a load are raised as they are.
            TpiError: if the units do not fit in addition to held units, or the cache is closed.
        """
        units = self._numbers(keys)
        slots = self.slots.pin(self.shelf, units)
        self._note(units)
        try:
            yield self._wait(units, slots)
        finally:
            self.slots.release(self.shelf, slots, self._device)

    @contextmanager
    def follow(self, keys: Sequence[Key]) -> Iterator[Iterator[Bytes]]:
        """Yield an iterator over the bytes of `keys`, all of one block.

        Each unit is valid until the next one is requested.

        There may be more keys than slots. Errors are those of `hold`; some are raised during the iteration.
        """
        units = self._numbers(keys)
        walk = UnitIterator(units, self._pin, self._bytes, self._unpin)
        self._note(units)
        try:
            yield walk
        finally:
            walk.close()

    @contextmanager
    def groups(self, keys: Sequence[Key]) -> Iterator[Iterator[list[Bytes]]]:
        """Yield an iterator over lists of the units' bytes: one list if all `keys` fit at once, else several.

        All keys belong to one block. Errors are those of `follow`.
        """
        units = self._numbers(keys)
        groups = GroupIterator(units, self.group_size(len(units)), self._pin, self._bytes, self._unpin)
        self._note(units)
        try:
            yield groups
        finally:
            groups.close()

    def share(self, keys: Sequence[Key], choose: ChooseCount) -> SharedHold:
        """Hold the loaded units of `keys` (of one block), and load as many of the others as `choose` says.

        The caller computes the units that are left out on another device. They count as used too. If the policy prefers
        such a unit to a resident one, it is loaded while the tier below is idle. The caller closes the hold. Errors are
        those of `hold`.
        """
        units = self._numbers(keys)
        self._note(units)
        with self.slots.lock:
            self.slots.require_open()
            wishes = len(self.shelf.read_ahead)
            parts, loads = self.shelf.divide(units, lambda *both: choose(*map(self._keys, both)))
            self.slots.submit(loads)
            self.slots.kick(len(self.shelf.read_ahead) - (0 if loads else wishes))
        return self._shared(*parts)

    def present(self, keys: Sequence[Key]) -> SharedHold:
        """Return a hold of those units of `keys` that are loaded. Load no other unit, and count no use."""
        with self.slots.lock:
            self.slots.require_open()
            ready, coming, lacking = self.shelf.sorted(self._numbers(keys))
            self.shelf.table.pin(ready)
        return self._shared(ready, ready[:0], np.concatenate([coming, lacking]))

    def warm(self, keys: Sequence[Key]) -> None:
        """Load the units `keys` before the first step, without counting these loads. Errors are those of `hold`."""
        for _, same in groupby(keys, key=lambda key: key[0]):
            with self.hold(list(same)):
                pass
        with self.slots.lock:
            self.shelf.counts.restore(DemandStats())

    def expect(self, keys: Sequence[Key]) -> None:
        """Announce that the next hold will be of `keys`, all of one block.

        The units are read ahead while the tier below is idle.
        """
        with self.slots.lock:
            if keys and not self.slots.closed:
                wishes = len(self.shelf.read_ahead)
                self.shelf.expect(keys[0][0], self._numbers(keys))
                self.slots.kick(len(self.shelf.read_ahead) - wishes)

    def abandon(self) -> None:
        """Abort a step: read no more units ahead for it, and forget the failures of its loads."""
        with self.slots.lock:
            self.shelf.read_ahead.clear()
        self.slots.abandon()

    @property
    def loaded_bytes(self) -> int:
        """Bytes loaded since the cache was opened, including loads that `stats` does not count."""
        return self.slots.loaded_bytes

    def stats(self) -> DemandStats:
        """Return the counts since the cache was created."""
        return self.slots.counts()

    def recording(self) -> tuple[Recording, DemandStats]:
        """Return the units that the first `RECORDED` steps used, and the counts of these steps."""
        with self.slots.lock:
            steps = tuple(tuple(step) for step in self._recorded)
            return Recording(self._blocks, steps), (self._counted or self.shelf.counts).copy()

    def close(self) -> None:
        """Stop loading, and join all threads of the cache. Further calls do nothing."""
        self.slots.close()

    def _numbers(self, keys: Sequence[Key]) -> Units:
        return np.array([self._number[key] for key in keys], np.int64)

    def _keys(self, units: Units) -> list[Key]:
        return [self._source.keys[unit] for unit in units.tolist()]

    def _shared(self, ready: Units, late: Units, left: Units) -> SharedHold:
        held = np.concatenate([ready, late])
        return SharedHold(
            self._keys(ready),
            self._keys(late),
            self._keys(left),
            lambda key: self._bytes(self._numbers([key]))[0],
            lambda: self._unpin(held),
        )

    def _note(self, units: Units) -> None:
        with self.slots.lock:
            if self._recorded and self._counted is None:
                self._recorded[-1].append(units)

    def _pin(self, units: Units, at_least: int) -> int:
        return len(self.slots.pin(self.shelf, units, at_least))

    def _unpin(self, units: Units) -> None:
        self.slots.release(self.shelf, self.shelf.table.slot_of[units], self._device)

    def _bytes(self, units: Units) -> list[Bytes]:
        return self._wait(units, self.shelf.table.slot_of[units])

    def _wait(self, units: Units, slots: Units) -> list[Bytes]:
        self.slots.wait(self.shelf, slots)
        view, data = self._source.view, self._slots
        return [view(unit, data[slot]) for unit, slot in zip(units.tolist(), slots.tolist(), strict=True)]
