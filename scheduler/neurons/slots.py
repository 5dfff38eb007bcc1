"""The index of a layer's slots and neurons: numbers only, without threads or the arena's memory.

A slot holds one record. It is empty, is being filled, or holds a neuron; no side computes with a slot that is being
filled. The first slots are fixed: their neurons are never replaced. A move fills a run of other slots with one copy.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.errors import PlanError

I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class NeuronMove:
    """A move of `neurons`, int32 in any order, to as many adjacent slots, the first of which is `first`."""

    first: int
    neurons: I32

    @property
    def slots(self) -> slice:
        """The slots that the move fills."""
        return slice(self.first, self.first + len(self.neurons))


class NeuronSlots:
    """The index table of one layer's arena (DynamicInfer's gpu_bucket)."""

    def __init__(self, neurons: int, slots: int, fixed: int = 0) -> None:
        """Create `slots` empty slots for a layer of `neurons` neurons; the first `fixed` are filled only once.

        Raises:
            PlanError: if there are more fixed slots than slots.
        """
        if not 0 <= fixed <= slots:
            raise PlanError(f"{fixed} neurons cannot stay in {slots} slots; give the accelerator more memory")
        self.fixed = fixed
        self.slot_of = np.full(neurons, -1, np.int32)  # neurons that have arrived or are being moved; else -1
        self.neuron_of = np.full(slots, -1, np.int32)
        self.filling = np.zeros(slots, np.bool_)
        self.uses = np.zeros(slots, np.int32)  # running calls that read each slot
        self.version = 0  # changes whenever `there` does

    def __len__(self) -> int:
        return len(self.neuron_of)

    @property
    def there(self) -> Marks:
        """Mask `[neurons]` of the neurons that the accelerator can compute now."""
        found = np.zeros(len(self.slot_of), np.bool_)
        found[self.neuron_of[(self.neuron_of >= 0) & ~self.filling]] = True
        return found

    @property
    def movable(self) -> Marks:
        """Mask `[slots]` of the slots that a move may fill now."""
        free: Marks = ~self.filling & (self.uses == 0)
        free[: self.fixed] = False
        return free

    def use(self, neurons: I32) -> I32:
        """Return the slots of `neurons`, which must all be in slots, and protect them until `release`."""
        slots = self.slot_of[neurons]
        self.uses[slots] += 1
        return slots

    def release(self, slots: I32) -> None:
        """End one use of each of `slots`."""
        self.uses[slots] -= 1

    def begin(self, move: NeuronMove) -> None:
        """Empty the slots of `move` and mark them as being filled.

        Raises:
            PlanError: if a slot is being read or filled, or a neuron has a slot already.
        """
        free = ~self.filling & (self.uses == 0)
        if not free[move.slots].all() or (self.slot_of[move.neurons] >= 0).any():
            raise PlanError(f"slots {move.slots.start} to {move.slots.stop - 1} of an arena cannot be filled now")
        self._empty(move.slots)
        self.neuron_of[move.slots] = move.neurons
        self.slot_of[move.neurons] = np.arange(move.slots.start, move.slots.stop)
        self.filling[move.slots] = True

    def finish(self, move: NeuronMove, arrived: bool) -> None:
        """End a move; if its copy failed (not `arrived`), leave its slots empty."""
        self.filling[move.slots] = False
        if not arrived:
            self._empty(move.slots)
        self.version += 1

    def faults(self) -> list[str]:
        """Return the contradictions in the index, as sentences; for tests."""
        slots, neurons = np.flatnonzero(self.neuron_of >= 0), np.flatnonzero(self.slot_of >= 0)
        wrong = []
        if len(slots) != len(neurons) or (self.slot_of[self.neuron_of[slots]] != slots).any():
            wrong.append("a neuron is in two slots, or a slot has two neurons")
        if (self.uses < 0).any() or self.uses[self.filling].any():
            wrong.append("a slot is released twice, or read while it is filled")
        return wrong

    def _empty(self, slots: slice) -> None:
        gone = self.neuron_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.neuron_of[slots] = -1
        self.version += 1
