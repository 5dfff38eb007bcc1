"""The arena's index under random moves, uses, failures and ends, compared with a plain model of the memory."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.neurons.moves import NeuronMove, choose_move
from scheduler.neurons.thresholds import balanced_shares, plain_shares
from scheduler.slots.table import I32, SlotTable
from tests.support.devices.neurons import FAST, SLOW
from tests.support.slots import table_faults

HALF = -2  # what is in a slot while a record is on its way


class SlotsMachine(RuleBasedStateMachine):
    @initialize(neurons=st.integers(1, 40), slots=st.integers(1, 24), data=st.data())
    def start(self, neurons: int, slots: int, data: st.DataObject) -> None:
        self.random = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
        slots = min(slots, neurons)
        fixed = data.draw(st.integers(0, slots))
        self.neurons, self.table = neurons, SlotTable(neurons, slots, np.int32, fixed)
        self.memory = np.full(slots, -1)  # what a record in each slot would be
        hot = self.random.permutation(neurons)[:slots].astype(np.int32)
        self.fixed = hot[:fixed]
        self.moves: list[NeuronMove] = []
        self.held: list[tuple[I32, I32]] = []
        if slots:
            self._begin(NeuronMove(0, hot))
            self._finish(0, True)

    @rule(room=st.integers(0, 30), gain=st.sampled_from([0.0, 0.25]))
    def move(self, room: int, gain: float) -> None:
        predicted = np.flatnonzero(self.random.random(self.neurons) < 0.5).astype(np.int32)
        values = self.random.random(self.neurons)
        move = choose_move(self.table, values, predicted, room, gain)
        if move is not None:
            assert len(move.neurons) <= room
            assert self.table.free[move.slots].all()
            assert move.first >= self.table.fixed
            self._begin(move)

    @precondition(lambda self: self.moves)
    @rule(which=st.integers(0, 99), arrived=st.booleans())
    def end(self, which: int, arrived: bool) -> None:
        self._finish(which % len(self.moves), arrived)

    @rule(threshold=st.floats(-2, 2), balanced=st.booleans())
    def compute(self, threshold: float, balanced: bool) -> None:
        scores = self.random.normal(0, 2, self.neurons).astype(np.float32)
        there = self.table.loaded
        shares = plain_shares(scores, threshold, there)
        active = np.sort(np.concatenate([shares.on_accelerator, shares.on_cpu]))
        assert active.tolist() == np.flatnonzero(scores >= np.float32(threshold)).tolist()
        if balanced:
            shares = balanced_shares(scores, threshold, there, FAST, SLOW)
            both = np.concatenate([shares.on_accelerator, shares.on_cpu])
            assert len(np.unique(both)) == len(both)  # none twice
            assert shares.lost <= 1e-9
        slots = self.table.pin(shares.on_accelerator)
        assert self.memory[slots].tolist() == shares.on_accelerator.tolist()
        self.held.append((slots, shares.on_accelerator))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        slots, neurons = self.held.pop(which % len(self.held))
        assert self.memory[slots].tolist() == neurons.tolist()  # nothing was overwritten meanwhile
        self.table.unpin(slots)

    @invariant()
    def the_index_says_what_is_there(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert not table_faults(self.table)
        there = np.flatnonzero(self.table.loaded)
        assert self.memory[self.table.slot_of[there]].tolist() == there.tolist()
        assert len(there) <= len(self.memory)
        assert not hasattr(self, "fixed") or self.table.loaded[self.fixed].all()

    def _begin(self, move: NeuronMove) -> None:
        self.table.place(move.neurons, move.slots)
        self.memory[move.slots] = HALF
        self.moves.append(move)

    def _finish(self, which: int, arrived: bool) -> None:
        move = self.moves.pop(which)
        self.memory[move.slots] = move.neurons if arrived else -1
        self.table.end(move.slots, arrived)


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
