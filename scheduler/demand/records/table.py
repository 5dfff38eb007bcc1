"""Which neuron of a layer lies in which slot, what is on its way, who is used: numbers only, no threads, no memory.

A slot holds one record. It is empty, being filled, or has a neuron; *pinned* ones are asked for or computed with, and
stay. The index is compact, since a model has as many neurons as others have experts times a thousand: 4 bytes for each
neuron and 13 for each slot.
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
        self.slot_of = np.full(neurons, -1, np.int32)  # of what is there, or on its way
        self.neuron_of = np.full(slots, -1, np.int32)
        self.pins = np.zeros(slots, np.int32)
        self.filling = np.zeros(slots, np.bool_)
        self.broken = np.zeros(slots, np.bool_)  # what was on its way did not come

    def __len__(self) -> int:
        return len(self.neuron_of)

    @property
    def settling(self) -> bool:
        """Whether slots can be had as soon as they are filled."""
        return bool((self.filling & (self.pins == 0)).any())

    def pin(self, neurons: I32, values: F64) -> I32 | None:
        """Have all of `neurons`, each given once and in order, stay: those that have to be read, in order.

        They have the slots of what is worth least by `values` `[neurons of the layer]`. None, and nothing is changed,
        where there is no room for them beside what is pinned or being filled.
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
        """Those of `neurons`, which pass by and lie nowhere, that are worth more than what they replace, in order.

        The most valuable replaces what is worth least, and so on. Nothing is pinned.
        """
        free = self._least(len(neurons), values)
        hot = neurons[np.argsort(-values[neurons], kind="stable")][: len(free)]
        lost = self._lost(free, values)
        least = np.argsort(lost, kind="stable")
        better = np.flatnonzero(values[hot] > lost[least])
        self._place(hot[better], free[least[better]])
        return np.sort(hot[better])

    def unpin(self, neurons: I32) -> None:
        """One use of each, which is pinned, is over; what did not come has no slot any more."""
        slots = self.slot_of[neurons]
        self.pins[slots] -= 1
        self._drop(slots[self.broken[slots] & (self.pins[slots] == 0)])

    def arrived(self, slots: I32) -> None:
        """These can be computed with."""
        self.filling[slots] = False

    def failed(self, slots: I32) -> None:
        """These could not be filled; who has pinned them finds them broken."""
        self.filling[slots] = False
        self.broken[slots] = True
        self._drop(slots[self.pins[slots] == 0])

    def faults(self) -> list[str]:
        """What of the index contradicts itself; for tests."""
        slots, neurons = np.flatnonzero(self.neuron_of >= 0), np.flatnonzero(self.slot_of >= 0)
        wrong = []
        if len(slots) != len(neurons) or (self.slot_of[self.neuron_of[slots]] != slots).any():
            wrong.append("a neuron is in two slots, or a slot has two neurons")
        if (self.pins < 0).any() or self.pins[self.neuron_of < 0].any():
            wrong.append("an empty slot is pinned, or one was given back twice")
        if (self.filling & self.broken).any() or (self.broken & (self.pins == 0)).any():
            wrong.append("a slot that nobody uses is broken")
        return wrong

    def _least(self, count: int, values: F64) -> I32:
        """At most so many slots that nobody uses, those that could be lost the easiest, in no order."""
        slots = np.flatnonzero((self.pins == 0) & ~self.filling)
        if count < len(slots):
            slots = slots[np.argpartition(self._lost(slots, values), count)[:count]] if count else slots[:0]
        return slots.astype(np.int32)

    def _lost(self, slots: npt.NDArray[np.integer], values: F64) -> F64:
        """What each slot's neuron is worth."""
        neurons = self.neuron_of[slots]
        return np.where(neurons < 0, _EMPTY, values[neurons])

    def _place(self, neurons: I32, slots: I32) -> None:
        """`neurons` are on their way into these slots; what was there is gone."""
        gone = self.neuron_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.neuron_of[slots], self.slot_of[neurons] = neurons, slots
        self.filling[slots] = True

    def _drop(self, slots: I32) -> None:
        self.slot_of[self.neuron_of[slots]] = -1
        self.neuron_of[slots], self.broken[slots] = -1, False
