"""The index of record slots under random requests, reads, failures and ends, against a plain model of the memory."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.demand.records.table import I32, RecordTable

HALF = -2  # what is in a slot while a record is on its way


class TableMachine(RuleBasedStateMachine):
    @initialize(neurons=st.integers(1, 40), slots=st.integers(1, 24), seed=st.integers(0, 1 << 16))
    def start(self, neurons: int, slots: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.neurons, self.table = neurons, RecordTable(neurons, min(slots, neurons))
        self.memory = np.full(min(slots, neurons), -1)
        self.values = self.random.random(neurons)
        self.reads: list[I32] = []  # neurons on their way, together
        self.pinned: list[I32] = []

    @rule(most=st.integers(0, 12))
    def request(self, most: int) -> None:
        wanted = np.sort(self.random.permutation(self.neurons)[:most]).astype(np.int32)
        before = self.table.slot_of.copy(), self.table.neuron_of.copy()
        lacking = self.table.pin(wanted, self.values)
        if lacking is None:  # only where it does not fit beside what is pinned and being filled
            assert all((one == other).all() for one, other in zip(before, self._index(), strict=True))
            free = np.count_nonzero((self.table.pins == 0) & ~self.table.filling)
            there = before[0][wanted]
            mine = there[there >= 0]
            own = np.count_nonzero((self.table.pins[mine] == 0) & ~self.table.filling[mine])
            assert free - own < np.count_nonzero(there < 0)
            return
        slots = self.table.slot_of[wanted]
        assert (slots >= 0).all()
        assert len(set(slots.tolist())) == len(wanted)
        self._on_their_way(lacking)
        self.pinned.append(wanted)

    @rule(most=st.integers(0, 12))
    def pass_by(self, most: int) -> None:
        absent = np.flatnonzero(self.table.slot_of < 0).astype(np.int32)[:most]
        gone = self.table.neuron_of.copy()
        kept = self.table.adopt(absent, self.values)
        assert set(kept.tolist()) <= set(absent.tolist())
        replaced = gone[self.table.slot_of[kept]]
        lost = np.where(replaced < 0, -np.inf, self.values[replaced])
        assert (np.sort(self.values[kept]) >= np.sort(lost)).all()
        self._on_their_way(kept)

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 99), arrived=st.booleans())
    def end(self, which: int, arrived: bool) -> None:
        neurons = self.reads.pop(which % len(self.reads))
        slots = self.table.slot_of[neurons]
        assert (self.memory[slots] == HALF).all()
        self.memory[slots] = neurons if arrived else -1
        (self.table.arrived if arrived else self.table.failed)(slots)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        wanted = self.pinned.pop(which % len(self.pinned))
        slots = self.table.slot_of[wanted]
        ready = ~self.table.filling[slots] & ~self.table.broken[slots]
        assert self.memory[slots[ready]].tolist() == wanted[ready].tolist()  # nothing was overwritten meanwhile
        self.table.unpin(wanted)

    @invariant()
    def the_index_says_what_is_there(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        assert not table.faults()
        whole = np.flatnonzero((table.neuron_of >= 0) & ~table.filling & ~table.broken)
        assert self.memory[whole].tolist() == table.neuron_of[whole].tolist()
        assert (self.memory[table.filling] == HALF).all()
        uses = np.zeros(len(table), np.int64)
        for wanted in self.pinned:
            uses[table.slot_of[wanted]] += 1
        assert (uses == table.pins).all()

    def _index(self) -> tuple[I32, I32]:
        return self.table.slot_of, self.table.neuron_of

    def _on_their_way(self, neurons: I32) -> None:
        assert not self.memory[self.table.slot_of[neurons]].__eq__(HALF).any()  # no slot is filled twice at once
        self.memory[self.table.slot_of[neurons]] = HALF
        if len(neurons):
            self.reads.append(neurons)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
