"""A cache of units in equal slots of one piece of memory, filled from the tier below on demand.

    with cache.hold(keys) as data:      # waits until all are loaded; data is their bytes, in the order of the keys
    with cache.follow(keys) as units:   # yields them one after the other, as each is loaded
    with cache.groups(keys) as groups:  # yields as many at once as there is room for
    held = cache.share(keys, choose)    # those that are loaded, and as many of the others as are worth loading
    cache.expect(keys)                  # a hint: read ahead while the tier below is idle

A slot is not overwritten while its unit is held or loading. Demand loads go before read-ahead. A failed load raises in
the hold that waits for it, and the next hold tries again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from scheduler.demand.choice.replay import Recording
from scheduler.demand.groups import Groups, Walk
from scheduler.demand.loads import Gaps, IdleTime
from scheduler.demand.policies import Key, Policy
from scheduler.demand.shared import Choose, SharedHold
from scheduler.demand.sources import UnitTier
from scheduler.demand.stats import DemandStats
from scheduler.demand.store import Store, Verify
from scheduler.demand.workers import LoadWorkers
from scheduler.slots.table import Units
from scheduler.window.stats import ReadClock
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.errors import PlanError, TpiError
from tpi.trace import OFF, NoTrace

RECORDED = 256  # first steps whose uses are recorded, to compare policies


class DemandCache:
    """A cache whose units one thread at a time may hold. With a `device`, units are released after its queued calls."""

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
            raise PlanError(f"{memory.size} bytes hold no unit; give the cache at least {source.slot_bytes} bytes")
        self._device = device
        self._number = {key: number for number, key in enumerate(source.keys)}
        self._blocks = np.array([block for block, _ in source.keys], np.int64)
        self._recorded: list[list[Units]] = []
        self._counted: DemandStats | None = None  # the counts at the end of the recording
        self._store = Store(source, memory, policy, workers, verify, reads, trace, idle or Gaps(clock))

    @property
    def capacity(self) -> int:
        """Number of units that the cache has room for."""
        return len(self._store.table)

    def group_size(self, units: int) -> int:
        """Return how many of `units` units `groups` holds at once.

        If not all fit, it is half of the cache: one half is loaded while the other is used.
        """
        return max(1, units if units <= self.capacity else self.capacity // 2)

    def begin(self) -> None:
        """Begin a step: tell the policy, and start a new entry of the recording."""
        with self._store.lock:
            if len(self._recorded) < RECORDED:
                self._recorded.append([])
            elif self._counted is None:
                self._counted = self._store.stats.copy()
            self._store.policy.begin()
            self._store.stats.steps += 1

    @contextmanager
    def hold(self, keys: Sequence[Key]) -> Iterator[list[Bytes]]:
        """Hold all of `keys`, which are distinct and of one block; yield their bytes, 1-D uint8, in that order.

        Raises:
            WeightsError: if a unit cannot be loaded; names the file. Other errors of a load are raised as they are.
            TpiError: if they do not fit in addition to what is held, or the cache is closed.
        """
        units = self._numbers(keys)
        self._pin(units, len(units))
        self._note(units)
        try:
            yield [self._store.wait(unit) for unit in units.tolist()]
        finally:
            self._unpin(units)

    @contextmanager
    def follow(self, keys: Sequence[Key]) -> Iterator[Iterator[Bytes]]:
        """Yield an iterator over the bytes of `keys`, which are of one block; each is valid until the next is taken.

        There may be more keys than slots. Errors are those of `hold`; some are raised during the iteration.
        """
        units = self._numbers(keys)
        walk = Walk(units, self._pin, self._store.wait, self._unpin)
        self._note(units)
        try:
            yield walk
        finally:
            walk.close()

    @contextmanager
    def groups(self, keys: Sequence[Key]) -> Iterator[Iterator[list[Bytes]]]:
        """Yield an iterator over groups of the bytes of `keys`, which are of one block: one group if all fit.

        Errors are those of `follow`.
        """
        units = self._numbers(keys)
        groups = Groups(units, self.group_size(len(units)), self._pin, self._store.wait, self._unpin)
        self._note(units)
        try:
            yield groups
        finally:
            groups.close()

    def share(self, keys: Sequence[Key], choose: Choose) -> SharedHold:
        """Hold those of `keys` (of one block) that are loaded, and load as many of the others as `choose` says.

        The remaining units are computed elsewhere. They count as used, and are loaded while the tier below is idle if
        the policy prefers them to a resident unit. The caller closes the hold. Errors are those of `hold`.
        """
        units = self._numbers(keys)
        self._note(units)
        parts = self._store.divide(units, lambda ready, late: choose(self._keys(ready), self._keys(late)))
        return self._shared(*parts)

    def present(self, keys: Sequence[Key]) -> SharedHold:
        """Hold those of `keys` that are loaded, without loading others, counting a use or telling the policy."""
        return self._shared(*self._store.present(self._numbers(keys)))

    def warm(self, keys: Sequence[Key]) -> None:
        """Load `keys` before the first step, without counting these loads. Errors are those of `hold`."""
        for _, same in groupby(keys, key=lambda key: key[0]):
            with self.hold(list(same)):
                pass
        self._store.forget_counts()

    def expect(self, keys: Sequence[Key]) -> None:
        """Expect that the next hold of a block will be of `keys`, which are all of that block; read ahead if idle."""
        if keys:
            self._store.announce(keys[0][0], self._numbers(keys))

    @property
    def loaded_bytes(self) -> int:
        """Bytes loaded since the cache was opened, counted or not."""
        return self._store.loaded_bytes

    def stats(self) -> DemandStats:
        """Return the counts so far."""
        with self._store.lock:
            return self._store.stats.copy()

    def recording(self) -> tuple[Recording, DemandStats]:
        """Return the units that the first `RECORDED` steps used, and the counts of these steps."""
        with self._store.lock:
            steps = tuple(tuple(step) for step in self._recorded)
            return Recording(self._blocks, steps), (self._counted or self._store.stats).copy()

    def close(self) -> None:
        """Stop loading, and join all threads of the cache. Idempotent."""
        self._store.close()

    def _numbers(self, keys: Sequence[Key]) -> Units:
        return np.array([self._number[key] for key in keys], np.int64)

    def _keys(self, units: Units) -> list[Key]:
        return [self._store.source.keys[unit] for unit in units.tolist()]

    def _shared(self, ready: Units, late: Units, left: Units) -> SharedHold:
        held = np.concatenate([ready, late])
        number, wait = self._number, self._store.wait
        return SharedHold(
            self._keys(ready),
            self._keys(late),
            self._keys(left),
            lambda key: wait(number[key]),
            lambda: self._unpin(held),
        )

    def _note(self, units: Units) -> None:
        """Add `units` to the recording of the step."""
        with self._store.lock:
            if self._recorded and self._counted is None:
                self._recorded[-1].append(units)

    def _pin(self, units: Units, at_least: int) -> int:
        count = self._store.pin(units, at_least)
        if count < at_least and self._device is not None:
            self._device.start(lambda: None).wait()  # units that were held are released by then
            count = self._store.pin(units, at_least)
        if count < at_least:
            raise TpiError(
                f"{at_least} of {len(units)} units cannot be held: the cache has room for {self.capacity}, and others "
                "are held; release these first"
            )
        return count

    def _unpin(self, units: Units) -> None:
        """Release units, with a device after the calls that are queued on it."""
        if self._device is None:
            self._store.unpin(units)
        else:
            self._device.start(lambda: self._store.unpin(units))
