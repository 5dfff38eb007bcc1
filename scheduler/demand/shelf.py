"""The units of a demand cache: their eviction, prediction and read-ahead. The cache calls it under its lock."""

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.demand.loads import HintAccuracy, IdleTime, ReadAheadQueue
from scheduler.demand.policies import Policy
from scheduler.demand.sources import UnitTier
from scheduler.demand.stats import DemandStats
from scheduler.slots.shelf import Load, PriorityShelf
from scheduler.slots.table import F64, SlotTable, Units
from tpi.errors import TpiError

_WANTED_SOON = 2.0**100  # added to the priority of units that are expected and have not been used


class UnitShelf(PriorityShelf[np.int64]):
    """A shelf for the units of all blocks, numbered as in the source.

    Hints are not pinned. The units of a hint are evicted last, and wait to be read ahead until the tier below is idle.
    """

    def __init__(self, source: UnitTier, slots: int, policy: Policy, idle: IdleTime) -> None:
        units = len(source.keys)
        super().__init__("the cache", SlotTable(units, slots), self.priority, DemandStats())
        self.policy, self.source = policy, source
        self.read_ahead = ReadAheadQueue()
        self._names = [f"block {block}, unit {own}" for block, own in source.keys]
        self._idle, self._hints = idle, HintAccuracy()
        self._unused = np.zeros(slots, np.bool_)  # True for slots that were filled ahead and not used since
        self._announced: dict[int, Units] = {}  # expected units by block
        self._wanted_soon = np.zeros(units, np.bool_)  # True for these units
        self._demanded = 0  # number of loads on demand that have not ended
        self._ahead: dict[Load, int] = {}  # bytes of each load ahead that has not ended

    @property
    def counts(self) -> DemandStats:
        """Statistics of the cache, updated in place."""
        assert isinstance(self.stats, DemandStats)
        return self.stats

    def priority(self, units: Units) -> F64:
        """Return the priority of keeping each of `units`: the policy's, and more for units that are expected."""
        return self.policy.priority(units) + _WANTED_SOON * self._wanted_soon[units]

    def claim(self, units: Units) -> tuple[Units, Sequence[Load]]:
        """Pin `units` and count a use of each; return their slots, and the loads of units without a slot."""
        return self.claim_some(units, units)

    def claim_some(self, units: Units, used: Units) -> tuple[Units, Sequence[Load]]:
        """Pin `units`, for which there is room, and count a use of each of `used`, all of one block.

        Return the slots of `units`, and the loads of units without a slot.
        """
        if not len(used):
            return units, ()
        self._mark(self.source.keys[used[0]][0], units[:0])
        lacking = self.table.admit(units, self._priority)
        self.policy.use(used)
        slots, missing = self.table.slot_of[units], self.table.slot_of[lacking]
        wasted = int(np.count_nonzero(self._unused[missing]))
        self._judge(int(np.count_nonzero(self._unused[slots])) - wasted, wasted)
        self._unused[slots] = False
        misses = int(np.count_nonzero(self.table.loading[slots]))
        self.stats.misses += misses
        self.stats.hits += len(units) - misses
        self._idle.asked(bool(len(lacking)))
        self._demanded += len(lacking)
        if len(lacking):
            self.read_ahead.clear()
        return slots, [self._load(lacking[at : at + 1], missing[at : at + 1]) for at in range(len(lacking))]

    def sorted(self, units: Units) -> tuple[Units, Units, Units]:
        """Divide `units` into three groups: loaded, loading or failed, and without a slot."""
        slots = self.table.slot_of[units]
        coming = (slots >= 0) & (self.table.loading[slots] | self.table.failed[slots])
        return units[(slots >= 0) & ~coming], units[coming], units[slots < 0]

    def divide(
        self, units: Units, choose: Callable[[Units, Units], int]
    ) -> tuple[tuple[Units, Units, Units], Sequence[Load]]:
        """Pin the `units` (of one block) that are loaded, and as many of the others as `choose` says.

        Return the loaded units, the pinned units that are not loaded yet, the units that are left out, and the loads to
        begin. Of the units that are not loaded, those that are already loading come first, then those with the highest
        priority. Units that are left out are queued to be read ahead.
        """
        ready, coming, lacking = self.sorted(units)
        late = np.concatenate([coming, lacking[np.argsort(-self.policy.priority(lacking), kind="stable")]])
        room = self.room(np.concatenate([ready, late])) - len(ready)
        count = min(choose(ready, late), room) if len(late) else 0
        _, loads = self.claim_some(np.concatenate([ready, late[:count]]), units)
        self.counts.elsewhere += len(late) - count
        self.read_ahead.add_first(self.table.missing(late[count:]).tolist())
        return (ready, late[:count], late[count:]), loads

    def expect(self, block: int, units: Units) -> None:
        """Mark `units` as expected in the next hold of `block`, and queue missing units to be read ahead."""
        self.policy.expect(units)
        self._mark(block, units)
        self.read_ahead.add(self.table.missing(units).tolist())

    def spare(self, speed: float) -> Load | None:
        """Return a load of the next unit to read ahead, or None.

        The unit's priority must be higher than that of the unit that it replaces, and there must be time to load it at
        `speed` bytes per second. If either is not so, or if earlier predictions were wrong, clear the queue and return
        None.
        """
        unit = self.read_ahead.pop(lambda unit: self.table.slot_of[unit] >= 0)
        if unit is None:
            return None
        size = self.source.nbytes(unit)
        units, slots = self.table.gains(np.array([unit]), self._priority)
        able = len(units) and self._idle.room(speed, sum(self._ahead.values())) >= size
        if not able or not self._hints.should_follow():
            self.read_ahead.clear()
            return None
        self._judge(0, int(self._unused[slots[0]]))
        self.table.place(units, slots)
        load = self._load(units, slots)
        self._unused[slots] = True
        self.counts.ahead += 1
        self._ahead[load] = size
        return load

    def describe(self, slots: Units) -> str:
        """Return the name of the first of `slots`' units that is still loading, for the trace of a hold that waits."""
        loading = slots[self.table.loading[slots]]
        return self._names[int(self.table.unit_of[loading[0]])]

    def refuse(self, units: Units) -> TpiError:
        """Return the error to raise for a hold of `units` for which there is no room."""
        return TpiError(
            f"{len(units)} units cannot be held: the cache has room for {len(self.table)}, and others are held; "
            "release these first"
        )

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark a load as ended; it failed if `error` is not None."""
        if error is not None:
            self._unused[load.slots] = False
        super().end(load, error)
        if load in self._ahead:
            del self._ahead[load]
        else:
            self._demanded -= 1
            if not self._demanded:
                self._idle.loaded()

    def _load(self, unit: Units, slot: Units) -> Load:
        return Load(self, unit, slot, self._names[unit[0]])

    def _mark(self, block: int, units: Units) -> None:
        self._wanted_soon[self._announced.pop(block, units)] = False
        self._wanted_soon[units] = True
        self._announced[block] = units

    def _judge(self, used: int, wasted: int) -> None:
        self.counts.ahead_used += used
        self.counts.ahead_wasted += wasted
        self._hints.add(used, wasted)
