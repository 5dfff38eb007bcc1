"""Request admission and pages: chunks, growth, exhaustion, release."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from master.deployment.pages import PagePool
from master.generation.batcher import Batcher
from master.generation.sequence import Sequence
from tpi.errors import PlanError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.net.messages import StepEntry
from worker.node.pages import PageTables


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_prompt_is_run_once_in_order_in_chunks(tokens: int, chunk: int) -> None:
    batcher, sequence = Batcher(PagePool(100), chunk), Sequence(0, list(range(tokens)))
    seen: list[int] = []
    announced: list[int] = []
    while sequence.pending:
        (work,) = batcher.pick([sequence])
        assert work.count <= chunk
        assert work.position == len(seen)
        seen += sequence.tokens[work.position : work.position + work.count]
        announced += work.appended
        assert len(announced) * PAGE_TOKENS >= len(seen)
        assert work.completes == (len(seen) == tokens)
        batcher.start([work])
        batcher.commit([work])
    assert seen == sequence.tokens
    assert announced == sequence.table


def test_chunk_is_shared_by_all_sequences_of_a_step() -> None:
    batcher = Batcher(PagePool(100), 10)
    work = batcher.pick([Sequence(0, [1] * 7), Sequence(1, [1] * 7), Sequence(2, [1])])
    assert [(item.sequence.id, item.count) for item in work] == [(2, 1), (0, 5), (1, 4)]


def test_answers_advance_and_short_prompts_pass_long_ones() -> None:
    batcher = Batcher(PagePool(200), 128)
    long, short, answers = Sequence(0, [1] * 4000), Sequence(1, [1] * 20), [Sequence(2 + i, [1]) for i in range(6)]
    work = {item.sequence.id: item.count for item in batcher.pick([long, *answers, short])}
    assert all(work[answer.id] == 1 for answer in answers)
    assert work[short.id] == 16  # half of a quarter of the chunk: prompts beside answers are kept short
    assert work[long.id] == 16
    assert batcher.pick([long])[0].count == 128


@given(st.integers(64, 512), st.integers(1, 8), st.integers(200, 4000))
def test_answers_wait_about_as_long_at_the_end_of_a_long_prompt(chunk: int, answers: int, even: int) -> None:
    """Far less than two chunks of it, in tokens and in the time of tokens that attend to all earlier ones."""
    batcher, long = Batcher(PagePool(200), chunk, even), Sequence(0, [1] * 4000)
    others, costs = [Sequence(1 + number, [1]) for number in range(answers)], list[float]()
    while long.pending:
        work = {item.sequence.id: item for item in batcher.pick([long, *others])}
        assert all(work[other.id].count == 1 for other in others)
        costs.append(work[0].count * (1 + work[0].position / even))
        assert work[0].count <= max(chunk // 4, PAGE_TOKENS) < 2 * chunk
        batcher.start([work[0]])
        batcher.commit([work[0]])
    least = PAGE_TOKENS * (1 + 4000 / even)  # shorter pieces would only make the prompt slower
    assert max(costs) <= max(costs[0], least) + 1e-9  # the sums are rounded
    assert min(costs[:-1]) > 0.8 * costs[0]  # pieces are whole tokens


def test_a_full_pool_is_a_clear_error_and_changes_nothing() -> None:
    pages = PagePool(2)
    table: list[int] = []
    with pytest.raises(PlanError, match="room for 64"):
        pages.append(table, 65)
    assert (table, pages.free) == ([], 2)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_no_page_is_given_twice_and_all_come_back(lengths: list[int]) -> None:
    pages = PagePool(50)
    tables: list[list[int]] = [[] for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        pages.append(table, length)
    given_out = [page for table in tables for page in table]
    assert len(set(given_out)) == len(given_out)
    for table in tables:
        pages.release(table)
    assert pages.free == 50


class Pages(RuleBasedStateMachine):
    """Sequences that grow, share pages and shrink, on the master and as a node is told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(40)
        self.node = PageTables(40, PAGE_TOKENS)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.announced: dict[int, int] = {}

    sequences = Bundle("sequences")

    @rule(target=sequences)
    def begin(self) -> int:
        return self._add([], 0)

    @rule(target=sequences, other=sequences)
    def share(self, other: int) -> int:
        table = self.pool.share(self.tables[other], self.lengths[other])
        return self._add(table, len(table) * PAGE_TOKENS)

    @rule(sequence=sequences, tokens=st.integers(1, 90))
    def run(self, sequence: int, tokens: int) -> None:
        table, length = self.tables[sequence], self.lengths[sequence]
        before = list(table)
        try:
            self.pool.append(table, length + tokens)
        except PlanError:
            assert table == before
            return
        kept = min(self.announced[sequence], len(table))
        batch = self.node.batch([StepEntry(sequence, length, tokens, kept, tuple(table[kept:]))])
        assert batch.tables.tolist() == [table]
        self.lengths[sequence], self.announced[sequence] = length + tokens, len(table)
        written = set(table[length // PAGE_TOKENS :])
        assert not any(written & set(other) for key, other in self.tables.items() if key != sequence)

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, self.lengths[sequence]))
        table = self.tables[sequence]
        self.pool.truncate(table, length)
        self.lengths[sequence] = min(length, len(table) * PAGE_TOKENS)
        self.announced[sequence] = min(self.announced[sequence], len(table))

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        held = {page for table in self.tables.values() for page in table}
        assert self.pool.free + len(held) == self.pool.total

    def _add(self, table: list[int], length: int) -> int:
        sequence = len(self.tables)
        self.tables[sequence], self.lengths[sequence], self.announced[sequence] = table, length, 0
        return sequence


TestPages = Pages.TestCase
