"""The index of record slots under random requests, reads, failures and ends, compared with a plain model."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.slots.table import F64, I32, SlotTable
from tests.support.slots import table_faults

HALF = -2  # what is in a slot while a record is on its way


class TableMachine(RuleBasedStateMachine):
    @initialize(neurons=st.integers(1, 40), slots=st.integers(1, 24), seed=st.integers(0, 1 << 16))
    def start(self, neurons: int, slots: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.neurons, self.table = neurons, SlotTable(neurons, min(slots, neurons), np.int32)
        self.memory = np.full(min(slots, neurons), -1)
        self.values = self.random.random(neurons)
        self.reads: list[I32] = []  # neurons on their way, together
        self.pinned: list[I32] = []

    @rule(most=st.integers(0, 12))
    def request(self, most: int) -> None:
        wanted = np.sort(self.random.permutation(self.neurons)[:most]).astype(np.int32)
        fitting = self.table.room_for(wanted)
        free = (self.table.pins == 0) & ~self.table.loading
        needed = [slot < 0 or free[slot] for slot in self.table.slot_of[wanted].tolist()]
        assert sum(needed[:fitting]) <= np.count_nonzero(free)  # in addition to what is pinned and being filled
        assert fitting == len(wanted) or sum(needed[: fitting + 1]) > np.count_nonzero(free)
        wanted = wanted[:fitting]
        lacking = self.table.admit(wanted, self._priority)
        slots = self.table.slot_of[wanted]
        assert (slots >= 0).all()
        assert len(set(slots.tolist())) == len(wanted)
        self._on_their_way(lacking)
        self.pinned.append(wanted)

    @rule(most=st.integers(0, 12))
    def pass_by(self, most: int) -> None:
        absent = np.flatnonzero(self.table.slot_of < 0).astype(np.int32)[:most]
        kept, slots = self.table.gains(absent, self._priority)
        assert set(kept.tolist()) <= set(absent.tolist())
        replaced = self.table.unit_of[slots]
        self.table.place(kept, slots)
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
        self.table.end(slots, arrived)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        wanted = self.pinned.pop(which % len(self.pinned))
        slots = self.table.slot_of[wanted]
        ready = ~self.table.loading[slots] & ~self.table.failed[slots]
        assert self.memory[slots[ready]].tolist() == wanted[ready].tolist()  # nothing was overwritten meanwhile
        self.table.unpin(slots)

    @invariant()
    def the_index_says_what_is_there(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        assert not table_faults(table)
        whole = np.flatnonzero((table.unit_of >= 0) & ~table.loading & ~table.failed)
        assert self.memory[whole].tolist() == table.unit_of[whole].tolist()
        assert sorted(table.unit_of[whole].tolist()) == np.flatnonzero(table.loaded).tolist()
        assert (self.memory[table.loading] == HALF).all()
        uses = np.zeros(len(table), np.int64)
        for wanted in self.pinned:
            uses[table.slot_of[wanted]] += 1
        assert (uses == table.pins).all()

    def _priority(self, neurons: I32) -> F64:
        return self.values[neurons]

    def _on_their_way(self, neurons: I32) -> None:
        assert not self.memory[self.table.slot_of[neurons]].__eq__(HALF).any()  # no slot is filled twice at once
        self.memory[self.table.slot_of[neurons]] = HALF
        if len(neurons):
            self.reads.append(neurons)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
