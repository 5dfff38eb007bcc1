"""The index of a cache: which unit is in which slot, which are pinned, and which is evicted. Numbers only."""

from collections.abc import Sequence

import numpy as np

from scheduler.demand.policies import F64, Policy, Units

_WANTED_SOON = 2.0**100  # added to the worth of units that are expected and have not been used
_FEW = 128  # values: sorting that many takes no longer than finding the least of them


def _least(worth: F64, count: int) -> Units:
    """Return the positions of the `count` least values, in ascending order; of equal values, the first.

    If there are many values, only the least are sorted.
    """
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
        self.pins = np.zeros(slots, np.int64)  # number of holds of each slot
        self.loading = np.zeros(slots, np.bool_)
        self.announced = np.zeros(units, np.bool_)

    def __len__(self) -> int:
        return len(self.unit_of)

    def lacking(self, units: Units) -> Units:
        """Return those of `units` that have no slot, in their order."""
        lacking: Units = units[self.slot_of[units] < 0]
        return lacking

    def fitting(self, units: Units) -> int:
        """Return how many of `units`, from the first on, can be pinned in addition to the present pins."""
        room = int(np.count_nonzero((self.pins == 0) & ~self.loading))
        for count, slot in enumerate(self.slot_of[units].tolist()):
            room -= slot < 0 or not (self.pins[slot] or self.loading[slot])
            if room < 0:
                return count
        return len(units)

    @property
    def settling(self) -> bool:
        """True if a slot is loading but not pinned, so that it becomes available when the load ends."""
        return bool((self.loading & (self.pins == 0)).any())

    def pin(self, units: Units) -> None:
        """Add one pin to each of `units`, which must have slots."""
        self.pins[self.slot_of[units]] += 1

    def unpin(self, units: Units) -> None:
        """Remove one pin from each of `units`."""
        self.pins[self.slot_of[units]] -= 1

    def admit(self, units: Units, policy: Policy) -> Units:
        """Pin `units`, which must fit; assign slots to those that have none, and return these."""
        lacking = self.lacking(units)
        present = units[self.slot_of[units] >= 0]
        self.pin(present)
        self.place(lacking, self.slots_for(len(lacking), policy))
        self.pin(lacking)
        return lacking

    def slots_for(self, count: int, policy: Policy) -> Units:
        """Return up to `count` slots that are not in use: first empty ones, then those of the least worth."""
        free = np.flatnonzero(self.unit_of < 0)[:count]
        count -= len(free)
        if not count:
            return free
        used = np.flatnonzero((self.pins == 0) & ~self.loading & (self.unit_of >= 0))
        units = self.unit_of[used]
        worth = policy.worth(units) + _WANTED_SOON * self.announced[units]
        return np.concatenate([free, used[_least(worth, count)]])

    def gains(self, unit: int, slot: int, policy: Policy) -> bool:
        """Return True if `unit` should replace the unit in `slot`: it is worth more, and that one is not expected."""
        before = int(self.unit_of[slot])
        if before < 0 or (self.announced[unit] and not self.announced[before]):
            return True
        one, other = policy.worth(np.array([unit, before])).tolist()
        return bool(one > other) and not self.announced[before]

    def place(self, units: Units, slots: Units) -> None:
        """Assign `slots` to `units`; the units that had them lose them."""
        gone = self.unit_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.unit_of[slots] = units
        self.slot_of[units] = slots

    def drop(self, unit: int) -> None:
        """Clear the slot of a unit."""
        slot = int(self.slot_of[unit])
        self.slot_of[unit], self.unit_of[slot], self.loading[slot] = -1, -1, False

    def faults(self) -> Sequence[str]:
        """Return descriptions of contradictions in the index, for tests."""
        slots = np.flatnonzero(self.unit_of >= 0)
        units = np.flatnonzero(self.slot_of >= 0)
        wrong = []
        if len(slots) != len(units) or (self.slot_of[self.unit_of[slots]] != slots).any():
            wrong.append("a unit is in two slots, or a slot has two units")
        if (self.pins < 0).any() or self.pins[self.unit_of < 0].any():
            wrong.append("an empty slot is held")
        return wrong
