"""One layer's part of an accelerator's arena: which neurons each side computes, and which neurons migrate."""

from typing import TYPE_CHECKING

import numpy as np

from scheduler.neurons.costs import LineCost
from scheduler.neurons.importance import NeuronImportance
from scheduler.neurons.layout import ArenaLayer
from scheduler.neurons.moves import choose_move
from scheduler.neurons.thresholds import F32, NeuronShares, balanced_shares, plain_shares
from scheduler.slots.shelf import Load, PriorityShelf
from scheduler.slots.table import I32, Marks, SlotTable
from tpi.devices.pages import Bytes

if TYPE_CHECKING:
    from scheduler.neurons.arena import NeuronArena


class HeldNeurons:
    """The division of a layer's active neurons between the accelerator and the CPU, for one call of each.

    The accelerator computes `neurons`, which are in its `slots`; the CPU computes `cpu_neurons`. No move overwrites the
    slots until `release` or `cancel`.
    """

    __slots__ = ("_layer", "cpu_neurons", "neurons", "shares", "slots")

    def __init__(self, layer: "LayerArena", shares: NeuronShares, slots: I32) -> None:
        self._layer, self.shares, self.slots = layer, shares, slots
        self.neurons, self.cpu_neurons = shares.on_accelerator, shares.on_cpu

    def release(self) -> None:
        """Allow moves to overwrite the slots. Call this once, after the accelerator has read the slots."""
        self._layer.release_slots(self.slots)

    def cancel(self) -> None:
        """Release the slots, and subtract the neurons from the statistics.

        Call this instead of `release` if no call was made.
        """
        self._layer.cancel(self)


class LayerArena(PriorityShelf[np.int32]):
    """The slots of one layer in a `NeuronArena`."""

    def __init__(self, arena: "NeuronArena", layer: ArenaLayer, data: Bytes) -> None:
        """Create the layer's empty slots in `data`, a part of the arena's memory on the accelerator.

        If neurons do not migrate, the slots are filled only once.
        """
        fixed = layer.fixed if arena.migration.migrate else layer.slots
        self.layer, self.data = layer, data
        self.importance = NeuronImportance(layer.frequency, arena.migration.weight)
        table = SlotTable(layer.neurons, layer.slots, np.int32, fixed)
        super().__init__(layer.name, table, self.importance.priority, arena.slots.stats)
        self._arena, self._lock = arena, arena.slots.lock
        self._there: tuple[int, Marks] = (-1, np.empty(0, np.bool_))

    def divide(self, scores: F32, threshold: float) -> HeldNeurons:
        """Divide one token's neurons among the accelerator and the CPU.

        A neuron is active if its score in `scores` `[neurons]` reaches `threshold`. The neurons that pad the last
        unit have no scores and are never computed.
        """
        if (more := self.layer.neurons - len(scores)) > 0:
            scores = np.pad(scores, (0, more), constant_values=-np.inf)
        meter = self._arena.meter
        lines = meter.lines() if self._arena.migration.balance else None
        with self._lock:
            there = self._marks()
            if lines is None:
                return self._held(plain_shares(scores, threshold, there))
            shares = balanced_shares(scores, threshold, there, *lines)
            if self is self._arena.layers[0]:
                meter.thresholds(shares)
            return self._held(shares)

    def divide_active(self, active: I32) -> HeldNeurons:
        """Divide the neurons `active` between the accelerator, if it has them, and the CPU.

        `active` is int32, ascending and unique.
        """
        with self._lock:
            there = self._marks()[active]
            return self._held(NeuronShares(active[there], active[~there], 0.0, 0.0))

    def expect(self, predicted: I32) -> None:
        """Begin to move important neurons to the accelerator, given the neurons `predicted` for the current token.

        `predicted` is int32, in any order and unique.
        """
        arena = self._arena
        if not arena.migration.migrate or not len(self.table):
            return
        with self._lock:
            room = arena.room()
            values = self.importance.values(predicted)
            move = choose_move(self.table, values, predicted, room) if room else None
            if move is not None:
                self.table.place(move.neurons, move.slots)
                title = f"{len(move.neurons)} neurons of {self.layer.name}"
                arena.slots.submit([Load(self, move.neurons, move.slots, title=title)], ahead=True)

    def count_active(self, active: I32) -> None:
        """Update the recent frequency of all neurons with `active`, the neurons that one token activated."""
        if self._arena.migration.migrate:
            with self._lock:
                self.importance.update(active)

    def record_accelerator_time(self, count: int, seconds: float, tokens: int = 1) -> None:
        """Record that the accelerator computed `count` neurons for `tokens` tokens in `seconds`.

        The time includes the transfers of activations.
        """
        self._arena.figures.accelerator_seconds += seconds
        self._arena.meter.record("accelerator", count, seconds, tokens)

    def record_cpu_time(self, count: int, seconds: float, tokens: int = 1) -> None:
        """Record that the CPU computed `count` neurons for `tokens` tokens in `seconds`."""
        self._arena.figures.cpu_seconds += seconds
        self._arena.meter.record("CPU", count, seconds, tokens)

    def release_slots(self, slots: I32) -> None:
        """Allow moves to overwrite `slots`, which a call of the accelerator has read."""
        self._arena.slots.release(self, slots)

    def cancel(self, held: HeldNeurons) -> None:
        """Release the slots of `held`, whose neurons were not computed, and subtract its neurons from the
        statistics.
        """
        figures = self._arena.figures
        figures.active -= len(held.neurons) + len(held.cpu_neurons)
        figures.active_on_accelerator -= len(held.neurons)
        self.release_slots(held.slots)

    def lines(self, tokens: int = 1) -> tuple[LineCost, LineCost] | None:
        """Return the accelerator's and the CPU's cost in steps of about `tokens` tokens; None until both are known."""
        return self._arena.meter.lines(tokens)

    def place(self, slots: slice) -> Bytes:
        """Return the memory of adjacent `slots`."""
        size = self.layer.record_bytes
        return self.data[slots.start * size : slots.stop * size]

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark the move `load` as ended. It has failed if `error` is not None."""
        super().end(load, error)
        if error is None:
            figures = self._arena.figures
            figures.moves += 1
            figures.moved += len(load.units)
            figures.moved_bytes += len(load.units) * self.layer.record_bytes

    def _held(self, shares: NeuronShares) -> HeldNeurons:
        figures = self._arena.figures
        figures.active += len(shares.on_accelerator) + len(shares.on_cpu)
        figures.active_on_accelerator += len(shares.on_accelerator)
        return HeldNeurons(self, shares, self.table.pin(shares.on_accelerator))

    def _marks(self) -> Marks:
        if self._there[0] != self.table.version:
            self._there = (self.table.version, self.table.loaded)
        return self._there[1]
