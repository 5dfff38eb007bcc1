"""Request admission and KV blocks: chunks, growth, exhaustion, release."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.batcher import Batcher
from master.kvblocks import KvBlocks
from master.sequence import Sequence
from tpi.errors import PlanError
from tpi.kernels.spec import BLOCK_TOKENS


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_prompt_is_run_once_in_order_in_chunks(tokens: int, chunk: int) -> None:
    batcher, sequence = Batcher(KvBlocks(100), chunk), Sequence(0, list(range(tokens)))
    seen: list[int] = []
    announced: list[int] = []
    while sequence.pending:
        (work,) = batcher.pick([sequence])
        assert work.count <= chunk
        assert work.position == len(seen)
        seen += sequence.tokens[work.position : work.position + work.count]
        announced += work.appended
        assert len(announced) * BLOCK_TOKENS >= len(seen)
        assert work.completes == (len(seen) == tokens)
        batcher.commit([work])
    assert seen == sequence.tokens
    assert announced == sequence.table


def test_chunk_is_shared_by_all_sequences_of_a_step() -> None:
    batcher = Batcher(KvBlocks(100), 10)
    work = batcher.pick([Sequence(0, [1] * 7), Sequence(1, [1] * 7), Sequence(2, [1])])
    assert [(item.sequence.id, item.count) for item in work] == [(0, 7), (1, 3)]


def test_a_full_pool_is_a_clear_error_and_changes_nothing() -> None:
    blocks = KvBlocks(2)
    table: list[int] = []
    with pytest.raises(PlanError, match="room for 64"):
        blocks.grow(table, 65)
    assert (table, blocks.free) == ([], 2)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_no_block_is_given_twice_and_all_come_back(lengths: list[int]) -> None:
    blocks = KvBlocks(50)
    tables: list[list[int]] = [[] for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        blocks.grow(table, length)
    given_out = [block for table in tables for block in table]
    assert len(set(given_out)) == len(given_out)
    for table in tables:
        blocks.release(table)
    assert blocks.free == 50
