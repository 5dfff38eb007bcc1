"""The states of recurrent layers on the master: each step continues from the state of exactly the tokens before it."""

from dataclasses import dataclass

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from master.deployment.pages import PagePool
from master.deployment.states import StatePool
from master.generation.batcher import Batcher
from master.generation.sequence import Sequence
from master.generation.steps import entry_of
from tpi.errors import MessageError
from tpi.kernels.spec import PAGE_TOKENS, STREAM_TOKENS
from tpi.net.messages import StepEntry
from worker.node.pages import PageTables

SLOTS, RUNNING = 7, 3


@dataclass(frozen=True)
class Drafted:
    """The drafted tokens of a sequence."""

    tokens: tuple[int, ...]


class States(RuleBasedStateMachine):
    """Sequences with a common beginning that run with drafts, are cut back and end.

    `contents` has the tokens that each slot stands for. A sequence may go back to the number of tokens in `since`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages = PagePool(200, StatePool(SLOTS))
        self.batcher = Batcher(self.pages, 96)
        self.node = PageTables(200, PAGE_TOKENS, SLOTS)
        self.contents: dict[int, list[int]] = {}
        self.since: dict[int, int] = {}
        self.running: list[Sequence] = []
        self.ids = iter(range(1 << 20))

    @rule(length=st.integers(1, 200), last=st.integers(0, 2))
    def begin(self, length: int, last: int) -> None:
        assume(len(self.running) < RUNNING)
        sequence = Sequence(next(self.ids), [*range(length), last], reuse=True)
        sequence.begin(self.pages)
        assert sequence.computed % PAGE_TOKENS == 0
        self.running.append(sequence)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        drafts = {
            sequence.id: Drafted(tuple(data.draw(st.lists(st.integers(3, 4), max_size=13 // len(self.running)))))
            for sequence in self.running
            if all(each.pending == 1 for each in self.running)
        }
        work = self.batcher.pick(self.running, drafts)
        batch = self.node.batch([entry_of(item) for item in work])
        assert batch.states is not None
        for item, (read, _, taken, _) in zip(work, batch.states.tolist(), strict=True):
            before = self.contents[read][: self.since[read] + taken] if read >= 0 else []
            assert before == list(item.sequence.tokens[: item.position])
        short = sum(item.count for item in work) <= STREAM_TOKENS
        for item, (_, write, _, later) in zip(work, batch.states.tolist(), strict=True):
            assert later == (item.count - 1 if short else 0)
            self.contents[write] = [*item.sequence.tokens[: item.position], *item.tokens]
            self.since[write] = item.position + item.count - later
        self.batcher.start(work)
        self.batcher.commit(work)
        for item in filter(lambda item: item.completes, work):
            right = data.draw(st.integers(0, len(item.drafted)))
            item.sequence.tokens.extend([*item.drafted[:right], 7])
            self.batcher.accept(item, right)

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
            if sequence.state is not None:
                assert self.since[sequence.state] <= sequence.since <= sequence.computed
                state = self.contents[sequence.state][: sequence.computed]
                assert state == list(sequence.tokens[: sequence.computed])
            else:
                assert not sequence.computed


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


def test_a_page_that_drafts_fill_is_found_again_with_its_state() -> None:
    pages = PagePool(40, StatePool(4))
    batcher, sequence = Batcher(pages, 96), Sequence(0, list(range(30)), reuse=True)
    batcher.start(work := batcher.pick([sequence]))
    batcher.commit(work)
    sequence.tokens.append(30)
    batcher.start(work := batcher.pick([sequence], {0: Drafted((31, 32, 33, 34))}))
    batcher.commit(work)
    sequence.tokens.extend([31, 32, 33, 7])
    batcher.accept(work[0], 3)
    assert (sequence.computed, sequence.since) == (34, 31)
    other = Sequence(1, list(range(40)), reuse=True)
    other.begin(pages)
    assert (other.computed, other.state) == (PAGE_TOKENS, sequence.state)
    (first,), (second,) = batcher.pick([sequence]), batcher.pick([other])
    assert first.read == second.read == sequence.state
    assert len({first.read, first.write, second.write}) == 3


def test_a_node_refuses_a_state_of_other_tokens() -> None:
    node = PageTables(40, PAGE_TOKENS, 4)
    node.batch([StepEntry(0, 0, 5, 0, (0,), 0, 1)])
    for position in (0, 6):
        with pytest.raises(MessageError, match="state of other tokens"):
            node.batch([StepEntry(0, position, 1, 1, (), 1, 1)])
    with pytest.raises(MessageError, match="state of other tokens"):
        node.batch([StepEntry(0, 3, 1, 1, (), 2, 2)])
    states = node.batch([StepEntry(0, 3, 1, 1, (), 1, 1)]).states
    assert states is not None
    assert states.tolist() == [[0, 0, 2, 0]]
