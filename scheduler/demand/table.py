"""Which unit lies in which slot, who is held and who goes: numbers only, no threads and no memory."""

from collections.abc import Sequence

import numpy as np

from scheduler.demand.policies import F64, Policy, Units

_WANTED_SOON = 2.0**100  # is added to the worth of what was announced and has not been used
_FEW = 128  # that are sorted in the time in which the least of them are found


def _least(worth: F64, count: int) -> Units:
    """Where the `count` least are, from the least on; of equals the first. Of many only those are sorted."""
    if count >= len(worth) or len(worth) < _FEW:
        return np.argsort(worth, kind="stable")[:count]
    among = np.flatnonzero(worth <= np.partition(worth, count - 1)[count - 1])
    least: Units = among[np.argsort(worth[among], kind="stable")[:count]]
    return least


class SlotTable:
    """The index of a cache of equal slots."""

    def __init__(self, units: int, slots: int) -> None:
        self.slot_of = np.full(units, -1)
        self.unit_of = np.full(slots, -1)
        self.pins = np.zeros(slots, np.int64)  # holds of each slot
        self.loading = np.zeros(slots, np.bool_)
        self.announced = np.zeros(units, np.bool_)

    def __len__(self) -> int:
        return len(self.unit_of)

    def lacking(self, units: Units) -> Units:
        """Those of `units` that have no slot, each once, in their order."""
        lacking: Units = units[self.slot_of[units] < 0]
        return lacking

    def fitting(self, units: Units) -> int:
        """How many of `units`, from the first on, can be pinned beside what is pinned now."""
        room = int(np.count_nonzero((self.pins == 0) & ~self.loading))
        for count, slot in enumerate(self.slot_of[units].tolist()):
            room -= slot < 0 or not (self.pins[slot] or self.loading[slot])
            if room < 0:
                return count
        return len(units)

    @property
    def settling(self) -> bool:
        """Whether there are slots that nobody holds, and that can be had when they are loaded."""
        return bool((self.loading & (self.pins == 0)).any())

    def pin(self, units: Units) -> None:
        """One more hold of each; they have slots."""
        self.pins[self.slot_of[units]] += 1

    def unpin(self, units: Units) -> None:
        """One hold less of each."""
        self.pins[self.slot_of[units]] -= 1

    def admit(self, units: Units, policy: Policy) -> Units:
        """Pin `units`, which fit; slots are found for those that lack one, which are returned."""
        lacking = self.lacking(units)
        present = units[self.slot_of[units] >= 0]
        self.pin(present)
        self.place(lacking, self.slots_for(len(lacking), policy))
        self.pin(lacking)
        return lacking

    def slots_for(self, count: int, policy: Policy) -> Units:
        """So many slots that nobody uses: free ones, then those of what is worth least; fewer if there are not."""
        free = np.flatnonzero(self.unit_of < 0)[:count]
        count -= len(free)
        if not count:
            return free
        used = np.flatnonzero((self.pins == 0) & ~self.loading & (self.unit_of >= 0))
        units = self.unit_of[used]
        worth = policy.worth(units) + _WANTED_SOON * self.announced[units]
        return np.concatenate([free, used[_least(worth, count)]])

    def gains(self, unit: int, slot: int, policy: Policy) -> bool:
        """Whether `unit` is worth more than what is in a slot, if anything is; what was announced stays."""
        before = int(self.unit_of[slot])
        if before < 0 or (self.announced[unit] and not self.announced[before]):
            return True
        one, other = policy.worth(np.array([unit, before])).tolist()
        return bool(one > other) and not self.announced[before]

    def place(self, units: Units, slots: Units) -> None:
        """`units` have these slots from now on; what was there is gone."""
        gone = self.unit_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.unit_of[slots] = units
        self.slot_of[units] = slots

    def drop(self, unit: int) -> None:
        """The slot of a unit is free."""
        slot = int(self.slot_of[unit])
        self.slot_of[unit], self.unit_of[slot], self.loading[slot] = -1, -1, False

    def faults(self) -> Sequence[str]:
        """What of the index contradicts itself; for tests."""
        slots = np.flatnonzero(self.unit_of >= 0)
        units = np.flatnonzero(self.slot_of >= 0)
        wrong = []
        if len(slots) != len(units) or (self.slot_of[self.unit_of[slots]] != slots).any():
            wrong.append("a unit is in two slots, or a slot has two units")
        if (self.pins < 0).any() or self.pins[self.unit_of < 0].any():
            wrong.append("an empty slot is held")
        return wrong
