"""A cache of units in equal slots of one piece of memory, filled from the tier below when they are wanted.

    with cache.hold(keys) as data:      # waits until all are there; data is their bytes, in the order of the keys
    with cache.follow(keys) as units:   # the same one after the other, each when it is there
    with cache.groups(keys) as groups:  # as many at once as there is room for
    held = cache.share(keys, choose)    # those that are there, and as many of the others as are worth their way
    cache.expect(keys)                  # a hint: read ahead as far as the tier below has time

Nothing is overwritten while it is held or being loaded. What is demanded goes before what is read ahead. A load that
failed surfaces in the hold that waits for it, and the next hold tries again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from scheduler.demand.choice.replay import Recording
from scheduler.demand.groups import Groups, Walk
from scheduler.demand.loads import Gaps, IdleTime
from scheduler.demand.policies import Key, Policy, Units
from scheduler.demand.shared import Choose, SharedHold
from scheduler.demand.sources import UnitTier
from scheduler.demand.stats import DemandStats
from scheduler.demand.store import Store, Verify
from scheduler.demand.workers import LoadWorkers
from scheduler.window.stats import ReadClock
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.errors import PlanError, TpiError
from tpi.trace import OFF, NoTrace

RECORDED = 256  # steps from the start, whose uses are kept for a comparison with other policies


class DemandCache:
    """Holds by one thread at a time. What is held for a `device` is given back when that has used it."""

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
        """Fill slots of `source.slot_bytes` bytes of `memory`, which for a disk's large units is page-aligned.

        `policy` knows the units of `source` by their numbers. `verify(unit, data)` sees each unit when it is loaded
        first, and raises if it is not what it should be; it is then read once more. `reads` is another reader's of the
        same disk. `clock` gives the seconds by which the tier below is said to be idle, unless `idle` says it.

        Raises:
            PlanError: if `memory` does not hold one unit.
        """
        if memory.size < source.slot_bytes:
            raise PlanError(f"{memory.size} bytes hold no unit; give the cache {source.slot_bytes} bytes at least")
        self._device = device
        self._number = {key: number for number, key in enumerate(source.keys)}
        self._blocks = np.array([block for block, _ in source.keys], np.int64)
        self._recorded: list[list[Units]] = []
        self._counted: DemandStats | None = None  # when the recording was full
        self._store = Store(source, memory, policy, workers, verify, reads, trace, idle or Gaps(clock))

    @property
    def capacity(self) -> int:
        """How many units there is room for."""
        return len(self._store.table)

    def group_size(self, units: int) -> int:
        """How many of so many units `groups` holds at once: one half of the cache is loaded while the other is used."""
        return max(1, units if units <= self.capacity else self.capacity // 2)

    def begin(self) -> None:
        """A step begins."""
        with self._store.lock:
            if len(self._recorded) < RECORDED:
                self._recorded.append([])
            elif self._counted is None:
                self._counted = self._store.stats.copy()
            self._store.policy.begin()
            self._store.stats.steps += 1

    @contextmanager
    def hold(self, keys: Sequence[Key]) -> Iterator[list[Bytes]]:
        """All of `keys` of one block at once, each given once: their bytes, 1-D uint8, in that order.

        Raises:
            WeightsError: if one could not be loaded; names the file. Or what else a load failed with.
            TpiError: if they are more than there is room for beside what is held, or the cache is closed.
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
        """The bytes of `keys`, of one block, one after the other; each is valid until the next is asked for.

        There may be more of them than there is room for. Errors as `hold`, some of them while iterating.
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
        """The bytes of `keys`, of one block, together: in one group if there is room for all, else in several.

        Errors as `follow`.
        """
        units = self._numbers(keys)
        groups = Groups(units, self.group_size(len(units)), self._pin, self._store.wait, self._unpin)
        self._note(units)
        try:
            yield groups
        finally:
            groups.close()

    def share(self, keys: Sequence[Key], choose: Choose) -> SharedHold:
        """Those of `keys`, of one block, that are there, and as many of the others as `choose` has loaded.

        What is left is computed elsewhere. It is used all the same, and loaded when the tier below is idle if the
        policy would rather have it than something that is there. The hold is closed by whoever asked. Errors as `hold`.
        """
        units = self._numbers(keys)
        self._note(units)
        parts = self._store.divide(units, lambda ready, late: choose(self._keys(ready), self._keys(late)))
        return self._shared(*parts)

    def present(self, keys: Sequence[Key]) -> SharedHold:
        """As `share`, of nothing but what is there; no use that is counted, or that a policy hears of."""
        return self._shared(*self._store.present(self._numbers(keys)))

    def warm(self, keys: Sequence[Key]) -> None:
        """Load `keys` before the first step, in which nothing of it is counted. Errors as `hold`."""
        for _, same in groupby(keys, key=lambda key: key[0]):
            with self.hold(list(same)):
                pass
        self._store.forget_counts()

    def expect(self, keys: Sequence[Key]) -> None:
        """A hint that `keys`, all of one block, are what its next hold wants."""
        if keys:
            self._store.announce(keys[0][0], self._numbers(keys))

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were loaded since it was opened, counted or not."""
        return self._store.loaded_bytes

    def stats(self) -> DemandStats:
        """The counts so far."""
        with self._store.lock:
            return self._store.stats.copy()

    def recording(self) -> tuple[Recording, DemandStats]:
        """What the first `RECORDED` steps used, and what was counted in them."""
        with self._store.lock:
            steps = tuple(tuple(step) for step in self._recorded)
            return Recording(self._blocks, steps), (self._counted or self._store.stats).copy()

    def close(self) -> None:
        """UnitLoad nothing more, and join every thread of its own. Idempotent."""
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
        """Keep for `recording` what was used."""
        with self._store.lock:
            if self._recorded and self._counted is None:
                self._recorded[-1].append(units)

    def _pin(self, units: Units, at_least: int) -> int:
        count = self._store.pin(units, at_least)
        if count < at_least and self._device is not None:
            self._device.start(_nothing).wait()  # what was held is given back by then
            count = self._store.pin(units, at_least)
        if count < at_least:
            raise TpiError(
                f"{at_least} of {len(units)} units cannot be held beside what is held: there is room for "
                f"{self.capacity} in all; release what is held first"
            )
        return count

    def _unpin(self, units: Units) -> None:
        """Give units back, when the device is through with what it was told so far."""
        if self._device is None:
            self._store.unpin(units)
        else:
            self._device.start(lambda: self._store.unpin(units))


def _nothing() -> None:
    """A call that comes after those before it."""
