"""One layer's part of an accelerator's arena: who computes what of it, and what migrates into it."""

from typing import TYPE_CHECKING

import numpy as np

from scheduler.neurons.costs import LineCost
from scheduler.neurons.layout import ArenaLayer
from scheduler.neurons.moves import choose_move
from scheduler.neurons.slots import I32, Marks, NeuronMove, NeuronSlots
from scheduler.neurons.thresholds import F32, NeuronShares, balanced_shares, plain_shares
from scheduler.neurons.worth import NeuronWorth
from tpi.devices.pages import Bytes

if TYPE_CHECKING:
    from scheduler.neurons.arena import NeuronArena


class HeldNeurons:
    """Who computes what of a layer for one call: `slots` on the accelerator, which has `neurons` there; `here` the CPU.

    A context manager, entered where it is made: nothing of `slots` is overwritten until `release`.
    """

    __slots__ = ("_layer", "here", "neurons", "shares", "slots")

    def __init__(self, layer: "LayerArena", shares: NeuronShares, slots: I32) -> None:
        self._layer, self.shares, self.slots = layer, shares, slots
        self.neurons, self.here = shares.there, shares.here

    def release(self) -> None:
        """The accelerator is through with the slots; once."""
        self._layer.release(self.slots)

    def give_up(self) -> None:
        """None of it is computed; in place of `release`."""
        self._layer.give_up(self)


class LayerArena:
    """One layer's part of a `NeuronArena`."""

    def __init__(self, arena: "NeuronArena", layer: ArenaLayer, data: Bytes, slots: NeuronSlots) -> None:
        self.layer, self.data, self.slots = layer, data, slots
        self.worth = NeuronWorth(layer.frequency, arena.moving.weight)
        self._arena, self._lock = arena, arena.lock
        self._there: tuple[int, Marks] = (-1, np.empty(0, np.bool_))

    def divide(self, scores: F32, threshold: float) -> HeldNeurons:
        """What each side computes of a token with these `scores` `[neurons]`; active from `threshold` on.

        What fills the last unit has no scores, and is never computed.
        """
        if (more := self.layer.neurons - len(scores)) > 0:
            scores = np.pad(scores, (0, more), constant_values=-np.inf)
        meter = self._arena.meter
        lines = meter.lines() if self._arena.moving.balance else None
        with self._lock:
            there = self._marks()
            if lines is None:
                return self._held(plain_shares(scores, threshold, there))
            shares = balanced_shares(scores, threshold, there, *lines)
            if self is self._arena.layers[0]:
                meter.thresholds(shares)
            return self._held(shares)

    def divide_active(self, active: I32) -> HeldNeurons:
        """The same for neurons that are known to be active, int32 in order, each once: all of them are computed."""
        with self._lock:
            there = self._marks()[active]
            return self._held(NeuronShares(active[there], active[~there], 0.0, 0.0))

    def expect(self, predicted: I32) -> None:
        """A token on its way is said to activate these, each given once."""
        arena = self._arena
        if not arena.moving.migrate or not len(self.slots):
            return
        with self._lock:
            room = arena.room()
            values = self.worth.values(predicted)
            move = choose_move(self.slots, values, predicted, room) if room else None
            if move is not None:
                self.slots.begin(move)
                arena.submit(self, move)

    def note(self, active: I32) -> None:
        """These were active for a token: what habits are made of."""
        if self._arena.moving.migrate:
            with self._lock:
                self.worth.note(active)

    def took_there(self, count: int, seconds: float, tokens: int = 1) -> None:
        """So many neurons took the accelerator so long with so many tokens, activations' way included."""
        self._arena.figures.seconds_there += seconds
        self._arena.meter.took("accelerator", count, seconds, tokens)

    def took_here(self, count: int, seconds: float, tokens: int = 1) -> None:
        """So many neurons took the CPU so long with so many tokens."""
        self._arena.figures.seconds_here += seconds
        self._arena.meter.took("CPU", count, seconds, tokens)

    def release(self, slots: I32) -> None:
        """See `HeldNeurons.release`."""
        with self._lock:
            self.slots.release(slots)

    def give_up(self, held: HeldNeurons) -> None:
        """See `HeldNeurons.give_up`."""
        figures = self._arena.figures
        figures.active -= len(held.neurons) + len(held.here)
        figures.active_there -= len(held.neurons)
        self.release(held.slots)

    def lines(self, tokens: int = 1) -> tuple[LineCost, LineCost] | None:
        """What neurons cost on the accelerator and on the CPU with about so many tokens, when both are known."""
        return self._arena.meter.lines(tokens)

    def place(self, move: NeuronMove) -> Bytes:
        """The bytes of a move's slots."""
        size = self.layer.record_bytes
        return self.data[move.slots.start * size : move.slots.stop * size]

    def _held(self, shares: NeuronShares) -> HeldNeurons:
        figures = self._arena.figures
        figures.active += len(shares.there) + len(shares.here)
        figures.active_there += len(shares.there)
        return HeldNeurons(self, shares, self.slots.use(shares.there))

    def _marks(self) -> Marks:
        if self._there[0] != self.slots.version:
            self._there = (self.slots.version, self.slots.there)
        return self._there[1]
