"""Pages that are found by their content: a found page is the one that was written, and shared pages stay unchanged."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from master.deployment.pages import PagePool
from master.deployment.prefixindex import BEGINNING, Key, chain
from master.generation.batcher import Batcher
from master.generation.sequence import Sequence
from tpi.errors import PlanError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.net.messages import StepEntry
from worker.node.pages import PageTables

POOL = 12
STEM = [7] * 100  # what most prompts begin with
PROMPTS = st.builds(
    lambda stem, rest: STEM[:stem] + rest, st.integers(0, 100), st.lists(st.integers(1, 2), min_size=1, max_size=40)
)


class PrefixPages(RuleBasedStateMachine):
    """Sequences that begin, are computed, preempted, released and begun again; records what each page holds."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(POOL)
        self.batcher = Batcher(self.pool, 64)
        self.node = PageTables(POOL, PAGE_TOKENS)
        self.live: list[Sequence] = []
        self.released: list[int] = []
        self.written: dict[int, list[int]] = {page: [] for page in range(POOL)}
        self.meant: dict[Key, list[int]] = {}
        self.count = 0

    @rule(target=sequences, prompt=PROMPTS)
    def begin(self, prompt: list[int]) -> Sequence:
        self.count += 1
        sequence = Sequence(self.count, list(prompt), reuse=True)
        sequence.begin(self.pool)
        assert sequence.computed < len(prompt)
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences)
    def compute(self, sequence: Sequence) -> None:
        before = list(sequence.table)
        try:
            work = self.batcher.pick([sequence])
        except PlanError:
            assert sequence.table == before
            return
        self.node.release(self.released)
        self.released.clear()
        for item in work:
            entry = StepEntry(item.sequence.id, item.position, item.count, item.kept, item.appended)
            assert self.node.batch([entry]).tables.tolist() == [item.sequence.table]
            for position in range(item.position, item.position + item.count):
                self._write(item.sequence, position)
        self.batcher.start(work)
        self.batcher.commit(work)

    @rule(sequence=sequences, token=st.integers(1, 2))
    def grow(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)

    @rule(sequence=sequences, data=st.data())
    def take_back(self, sequence: Sequence, data: st.DataObject) -> None:
        sequence.truncate(self.pool, data.draw(st.integers(1, len(sequence.tokens))))

    @rule(sequence=sequences, back=st.integers(1, 40), more=st.integers(1, 40))
    def go_another_way(self, sequence: Sequence, back: int, more: int) -> None:
        sequence.truncate(self.pool, max(1, len(sequence.tokens) - back))
        sequence.tokens.extend([3] * more)
        self.compute(sequence)

    @rule(sequence=consumes(sequences))
    def leave(self, sequence: Sequence) -> None:
        sequence.release_pages(self.pool)
        self.released.append(sequence.id)
        self.live.remove(sequence)

    @rule(sequence=sequences)
    def preempt(self, sequence: Sequence) -> None:
        sequence.release_pages(self.pool)
        self.released.append(sequence.id)
        sequence.begin(self.pool)

    @invariant()
    def what_is_computed_stands_in_the_pages(self) -> None:
        for sequence in self.live:
            held = [token for page in sequence.table for token in self.written[page]]
            assert held[: sequence.computed] == sequence.tokens[: sequence.computed]
            assert sequence.keys == list(chain(sequence.tokens[: sequence.computed]))

    @invariant()
    def what_can_be_found_stands_in_the_pages(self) -> None:
        for sequence in self.live:
            whole = zip(sequence.keys, range(0, sequence.computed, PAGE_TOKENS), strict=False)
            self.meant |= {key: list(sequence.tokens[first : first + PAGE_TOKENS]) for key, first in whole}
        held = {page for sequence in self.live for page in sequence.table}
        for key, tokens in self.meant.items():
            if (page := self.pool.contents.page(key)) is not None:
                assert self.written[page] == tokens
        for key in (BEGINNING, *self.meant):
            if (tail := self.pool.contents.tail(key)) is not None:
                assert self.written[tail.page][: len(tail.tokens)] == list(tail.tokens)
                assert tail.page not in held

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        held = {page for sequence in self.live for page in sequence.table}
        assert self.pool.free + len(held) == POOL

    def _write(self, sequence: Sequence, position: int) -> None:
        page, offset = sequence.table[position // PAGE_TOKENS], position % PAGE_TOKENS
        assert not any(page in other.table for other in self.live if other is not sequence)
        assert len(self.written[page]) >= offset or offset == 0
        self.written[page] = [*self.written[page][:offset], sequence.tokens[position]]


TestPrefixPages = PrefixPages.TestCase
TestPrefixPages.settings = settings(deadline=None, stateful_step_count=60)


def test_the_beginning_of_what_was_left_first_goes_last() -> None:
    pool = PagePool(4)
    batcher = Batcher(pool, 200)
    first = Sequence(0, [1] * 97)
    batcher.start(work := batcher.pick([first]))
    batcher.commit(work)
    first.release_pages(pool)
    table = pool.append([], 33)  # two of four pages go to another sequence
    assert len(table) == 2
    again = Sequence(1, [1] * 97, reuse=True)
    again.begin(pool)
    assert again.computed == 2 * PAGE_TOKENS


def test_equal_requests_share_pages_without_writing_them() -> None:
    pool = PagePool(10)
    batcher = Batcher(pool, 200)
    first, second = Sequence(0, [1] * 80), Sequence(1, [1] * 80, reuse=True)
    batcher.start(work := batcher.pick([first]))
    batcher.commit(work)
    second.begin(pool)
    assert second.table == first.table[:2]
    assert second.computed == 2 * PAGE_TOKENS
    batcher.start(work := batcher.pick([second]))
    batcher.commit(work)
    assert second.table[2] != first.table[2]
    assert pool.free == 10 - 4
