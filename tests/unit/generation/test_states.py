"""The states of recurrent layers on the master: each step continues from the state of exactly the tokens before it."""

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from master.deployment.pages import PagePool
from master.deployment.states import StatePool
from master.generation.batcher import Batcher
from master.generation.sequence import Sequence
from master.generation.steps import entry_of
from tpi.kernels.spec import PAGE_TOKENS
from worker.node.pages import PageTables

SLOTS, RUNNING = 7, 3


class States(RuleBasedStateMachine):
    """Sequences that begin alike, run, are cut back and leave. `contents` are the tokens that each slot stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PagePool(200, StatePool(SLOTS))
        self.batcher = Batcher(self.pages, 96)
        self.node = PageTables(200, PAGE_TOKENS, SLOTS)
        self.contents: dict[int, list[int]] = {}
        self.running: list[Sequence] = []
        self.ids = iter(range(1 << 20))

    @rule(length=st.integers(1, 200), last=st.integers(0, 2))
    def begin(self, length: int, last: int) -> None:
        assume(len(self.running) < RUNNING)
        sequence = Sequence(next(self.ids), [*range(length), last], reuse=True)
        sequence.begin(self.pages)
        assert sequence.computed % PAGE_TOKENS == 0
        self.running.append(sequence)

    @rule()
    def step(self) -> None:
        work = self.batcher.pick(self.running)
        self.node.batch([entry_of(item) for item in work])
        for item in work:
            tokens = list(item.sequence.tokens)
            assert (self.contents[item.read] if item.read is not None else []) == tokens[: item.position]
        for item in work:
            assert item.write is not None
            self.contents[item.write] = list(item.sequence.tokens[: item.position + item.count])
        self.batcher.start(work)
        self.batcher.commit(work)
        for item in work:
            if item.completes:
                item.sequence.tokens.append(7)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        assume(self.running)
        sequence = data.draw(st.sampled_from(self.running))
        sequence.truncate(self.pages, data.draw(st.integers(1, len(sequence.tokens))))
        sequence.tokens.append(9)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        assume(self.running)
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.node.release([sequence.id])
        sequence.release_pages(self.pages)

    @invariant()
    def a_state_is_that_of_the_computed_tokens(self) -> None:
        for sequence in self.running:
            state = self.contents[sequence.state] if sequence.state is not None else []
            assert state == list(sequence.tokens[: sequence.computed])


TestStates = States.TestCase


def test_all_slots_come_back() -> None:
    pages = PagePool(40, StatePool(4))
    assert pages.states is not None
    batcher, sequence = Batcher(pages, 32), Sequence(0, list(range(80)))
    while sequence.pending:
        batcher.start(work := batcher.pick([sequence]))
        batcher.commit(work)
    assert pages.states.find(sequence.keys) == (2, 1)
    pages.states.release(1)
    sequence.release_pages(pages)
    taken = [pages.states.take() for _ in range(4)]  # kept ones are given up for them
    assert sorted(taken) == [0, 1, 2, 3]
