"""The index of one layer's records: which neuron is in which slot, which are loading, and which are pinned.

A slot holds one record. It is empty, loading, or has a neuron. Pinned slots are requested or in use, and stay. The
index is compact, because a model has many neurons: 4 bytes for each neuron and 13 for each slot. Numbers only.
"""

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
SLOT_BYTES, NEURON_BYTES = 13, 4  # of a table, for each of them
_EMPTY = -np.inf  # what an empty slot has that could be lost


class RecordTable:
    """The index of one layer's slots."""

    def __init__(self, neurons: int, slots: int) -> None:
        self.slot_of = np.full(neurons, -1, np.int32)  # slot of each neuron that is loaded or loading
        self.neuron_of = np.full(slots, -1, np.int32)
        self.pins = np.zeros(slots, np.int32)
        self.filling = np.zeros(slots, np.bool_)
        self.broken = np.zeros(slots, np.bool_)  # True for slots whose load failed

    def __len__(self) -> int:
        return len(self.neuron_of)

    @property
    def settling(self) -> bool:
        """True if a slot is loading but not pinned, so that it becomes available when the load ends."""
        return bool((self.filling & (self.pins == 0)).any())

    def pin(self, neurons: I32, values: F64) -> I32 | None:
        """Pin `neurons` (ascending, distinct); return those that have to be read, in ascending order.

        Missing neurons replace those with the least worth in `values`, `[neurons of the layer]`. If there is no room in
        addition to pinned and loading slots, return None and change nothing.
        """
        slots = self.slot_of[neurons]
        self.pins[slots[slots >= 0]] += 1
        absent = neurons[slots < 0]
        free = self._least(len(absent), values)
        if len(free) < len(absent):
            self.pins[slots[slots >= 0]] -= 1
            return None
        self._place(absent, free)
        self.pins[free] += 1
        there = self.slot_of[neurons]
        self.filling[there] |= self.broken[there]
        again: I32 = neurons[(slots < 0) | self.broken[there]]
        self.broken[there] = False
        return again

    def adopt(self, neurons: I32, values: F64) -> I32:
        """Assign slots to those of `neurons` (read in passing, without a slot) that are worth more than others.

        The most valuable one replaces the neuron with the least worth, and so on. Return those that have a slot now, in
        ascending order. Nothing is pinned.
        """
        free = self._least(len(neurons), values)
        hot = neurons[np.argsort(-values[neurons], kind="stable")][: len(free)]
        lost = self._lost(free, values)
        least = np.argsort(lost, kind="stable")
        better = np.flatnonzero(values[hot] > lost[least])
        self._place(hot[better], free[least[better]])
        return np.sort(hot[better])

    def unpin(self, neurons: I32) -> None:
        """Remove one pin from each of `neurons`; a neuron whose load failed loses its slot with the last pin."""
        slots = self.slot_of[neurons]
        self.pins[slots] -= 1
        self._drop(slots[self.broken[slots] & (self.pins[slots] == 0)])

    def arrived(self, slots: I32) -> None:
        """Mark `slots` as loaded."""
        self.filling[slots] = False

    def failed(self, slots: I32) -> None:
        """Mark `slots` as failed: pinned ones become broken, others are emptied."""
        self.filling[slots] = False
        self.broken[slots] = True
        self._drop(slots[self.pins[slots] == 0])

    def faults(self) -> list[str]:
        """Return descriptions of contradictions in the index, for tests."""
        slots, neurons = np.flatnonzero(self.neuron_of >= 0), np.flatnonzero(self.slot_of >= 0)
        wrong = []
        if len(slots) != len(neurons) or (self.slot_of[self.neuron_of[slots]] != slots).any():
            wrong.append("a neuron is in two slots, or a slot has two neurons")
        if (self.pins < 0).any() or self.pins[self.neuron_of < 0].any():
            wrong.append("an empty slot is pinned, or one was given back twice")
        if (self.filling & self.broken).any() or (self.broken & (self.pins == 0)).any():
            wrong.append("a slot that is not in use is broken")
        return wrong

    def _least(self, count: int, values: F64) -> I32:
        """Return at most `count` slots that are not in use, those with the least worth, in no order."""
        slots = np.flatnonzero((self.pins == 0) & ~self.filling)
        if count < len(slots):
            slots = slots[np.argpartition(self._lost(slots, values), count)[:count]] if count else slots[:0]
        return slots.astype(np.int32)

    def _lost(self, slots: npt.NDArray[np.integer], values: F64) -> F64:
        """Return the worth of each slot's neuron."""
        neurons = self.neuron_of[slots]
        return np.where(neurons < 0, _EMPTY, values[neurons])

    def _place(self, neurons: I32, slots: I32) -> None:
        """Assign `slots` to `neurons` and mark them as loading; the neurons that had them lose them."""
        gone = self.neuron_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.neuron_of[slots], self.slot_of[neurons] = neurons, slots
        self.filling[slots] = True

    def _drop(self, slots: I32) -> None:
        self.slot_of[self.neuron_of[slots]] = -1
        self.neuron_of[slots], self.broken[slots] = -1, False
