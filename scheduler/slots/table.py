"""The index of a memory of equal slots: the unit in each slot, and the loading and pinned slots. Numbers only.

A slot is empty, loading, loaded or failed. It is in use while it is pinned or loading, and then keeps its unit. A
failed slot is emptied with its last pin. A table takes one index for each unit, and one index and 6 bytes for each
slot; neurons need the small index, because a model has many.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
Marks = npt.NDArray[np.bool_]
Units = npt.NDArray[np.int64]
"""Numbers of units: experts, counted over all blocks."""
Slots = npt.NDArray[np.signedinteger[Any]]
N = TypeVar("N", bound=np.signedinteger[Any])
Priority = Callable[[npt.NDArray[Any]], F64]
"""Returns the priority of keeping each of some units, float64 `[units]`; the unit with the lowest is evicted first."""
_FEW = 128  # values: sorting that many takes no longer than finding the least of them


def least(priority: F64, count: int) -> Units:
    """Return the positions of the `count` least values in `priority`, the least first; of equal values, the first.

    If there are many values, only the least `count` are sorted, to save time.
    """
    if count >= len(priority) or len(priority) < _FEW:
        return np.argsort(priority, kind="stable")[:count]
    among = np.flatnonzero(priority <= np.partition(priority, count - 1)[count - 1])
    found: Units = among[np.argsort(priority[among], kind="stable")[:count]]
    return found


class SlotTable(Generic[N]):
    """An index of equal slots and the units in them.

    Attributes:
        slot_of: the slot of each unit that is loaded or loading, else -1; `[units]`.
        unit_of: the unit of each slot, or -1 if it is empty; `[slots]`.
        pins: the number of holds and predictions that keep each slot.
        loading: True for slots that are being filled.
        failed: True for pinned slots whose load failed.
        none_failed: True if no slot is marked in `failed`, so that holds need not look.
        fixed: how many slots, the first ones, are filled once and never given to another unit.
        version: a number that changes whenever `loaded` may have changed.
    """

    slot_of: npt.NDArray[N]
    unit_of: npt.NDArray[N]

    @overload
    def __init__(self: "SlotTable[np.int64]", units: int, slots: int, *, fixed: int = 0) -> None: ...
    @overload
    def __init__(self, units: int, slots: int, index: type[N], fixed: int = 0) -> None: ...
    def __init__(self, units: int, slots: int, index: Any = np.int64, fixed: int = 0) -> None:
        """Create a table of `slots` empty slots for `units` units.

        `index` is the integer type of the indexes, and both counts must fit into it. The first `fixed` slots are filled
        once.
        """
        self.slot_of = np.full(units, -1, index)
        self.unit_of = np.full(slots, -1, index)
        self.pins = np.zeros(slots, np.int32)
        self.loading = np.zeros(slots, np.bool_)
        self.failed = np.zeros(slots, np.bool_)
        self.none_failed = True
        self.fixed = fixed
        self.version = 0

    def __len__(self) -> int:
        return len(self.unit_of)

    @property
    def loaded(self) -> Marks:
        """Mask `[units]`: True for units that are loaded."""
        found = np.zeros(len(self.slot_of), np.bool_)
        found[self.unit_of[(self.unit_of >= 0) & ~self.loading & ~self.failed]] = True
        return found

    @property
    def free(self) -> Marks:
        """Mask `[slots]`: True for slots that a load may fill now."""
        free: Marks = (self.pins == 0) & ~self.loading
        if self.fixed:
            free[: self.fixed] = False
        return free

    @property
    def settling(self) -> bool:
        """True if a slot is loading and not pinned, so that it becomes free when the load ends."""
        return bool((self.loading & (self.pins == 0)).any())

    def missing(self, units: npt.NDArray[N]) -> npt.NDArray[N]:
        """Return the `units` that have no slot, in their order."""
        missing: npt.NDArray[N] = units[self.slot_of[units] < 0]
        return missing

    def room_for(self, units: npt.NDArray[N]) -> int:
        """Return how many of `units`, counted from the first, can be pinned in addition to the present pins."""
        free = self.free
        room = int(np.count_nonzero(free))
        if len(units) <= room or not len(free):
            return min(len(units), room)
        slots = self.slot_of[units]
        return int(np.searchsorted(np.cumsum((slots < 0) | free[slots]), room, side="right"))

    def pin(self, units: npt.NDArray[N]) -> npt.NDArray[N]:
        """Add one pin to each of `units`, which are distinct and have slots; return their slots."""
        slots: npt.NDArray[N] = self.slot_of[units]
        self.pins[slots] += 1
        return slots

    def unpin(self, slots: Slots) -> None:
        """Remove one pin from each of `slots`; a failed slot is emptied with its last pin."""
        self.pins[slots] -= 1
        if not self.none_failed:
            self.clear(slots[self.failed[slots] & (self.pins[slots] == 0)])

    def admit(self, units: npt.NDArray[N], priority: Priority) -> npt.NDArray[N]:
        """Pin `units`, which must fit; return the units to load, in their order, and mark these as loading.

        Units to load are units without a slot, each of which gets one, and units whose load failed.
        """
        slots = self.slot_of[units]
        absent = slots < 0
        if self.none_failed and not absent.any():
            self.pins[slots] += 1
            return units[:0]
        self.pins[slots[~absent]] += 1
        slots[absent] = free = self.least(int(np.count_nonzero(absent)), priority)
        self.place(units[absent], free)
        self.pins[free] += 1
        again = self.failed[slots]
        self.loading[slots[again]], self.failed[slots] = True, False
        missing: npt.NDArray[N] = units[absent | again]
        return missing

    def least(self, count: int, priority: Priority) -> Slots:
        """Return up to `count` free slots: empty slots first, then slots whose units have the lowest priority."""
        free = self.free
        empty = np.flatnonzero(free & (self.unit_of < 0))[:count]
        if len(empty) == count:
            return empty
        used = np.flatnonzero(free & (self.unit_of >= 0))
        return np.concatenate([empty, used[least(priority(self.unit_of[used]), count - len(empty))]])

    def gains(self, units: npt.NDArray[N], priority: Priority) -> tuple[npt.NDArray[N], Slots]:
        """Return which of `units`, none of which has a slot, should get one, and the slots that they should get.

        The unit with the highest priority replaces the resident unit with the lowest one, the second highest replaces
        the second lowest, and so on, as long as the new unit has the higher priority. `priority` has a value for every
        unit, `[units]`.
        """
        slots = self.least(len(units), priority)
        value, lost = priority(units), np.full(len(slots), -np.inf)
        used = self.unit_of[slots] >= 0
        lost[used] = priority(self.unit_of[slots[used]])
        best = np.argsort(-value, kind="stable")[: len(slots)]
        better = value[best] > lost
        return units[best[better]], slots[better]

    def place(self, units: npt.NDArray[N], slots: Slots | slice) -> None:
        """Give `slots`, which must be free, to `units`, and mark them as loading.

        Units that lay there lose their slots.
        """
        gone = self.unit_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.unit_of[slots] = units
        self.slot_of[units] = slots if isinstance(slots, np.ndarray) else np.arange(slots.start, slots.stop)
        self.loading[slots] = True
        self.version += 1

    def end(self, slots: Slots | slice, arrived: bool) -> None:
        """End the load of `slots`. If it failed, pinned slots become failed, and others are emptied."""
        self.loading[slots] = False
        self.version += 1
        if not arrived:
            slots = slots if isinstance(slots, np.ndarray) else np.arange(slots.start, slots.stop)
            self.failed[slots], self.none_failed = True, False
            self.clear(slots[self.pins[slots] == 0])

    def clear(self, slots: Slots) -> None:
        """Empty `slots`, which have units and are not in use."""
        self.slot_of[self.unit_of[slots]] = -1
        self.unit_of[slots], self.failed[slots] = -1, False
        self.none_failed = not self.failed.any()
        self.version += 1
