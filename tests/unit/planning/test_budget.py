"""Memory budgets: never exceeded, and refused in one sentence that names a sufficient setting."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.budget import (
    MemoryNeed,
    affordable_pages,
    budget_with_head,
    minimum_bytes,
    plan_budget,
    sufficient_budget,
    window_budget,
)
from scheduler.free import _group_limits, default_budget
from scheduler.model.placement import place_window
from scheduler.model.sizes import LONGEST_CHUNK, TILE
from tests.support.weights.configs import tiny_config
from tpi.devices.pages import PAGE
from tpi.errors import PlanError
from worker.plan.fit import token_bytes

MIB = 1 << 20
DEMAND = MemoryNeed(
    blocks=(36 * MIB, 132 * MIB) * 22, page_bytes=1 * MIB, pages=64, token=100_000, fixed=2 * MIB, head=250 * MIB
)

needs = st.builds(
    MemoryNeed,
    blocks=st.lists(st.integers(0, 40).map(lambda pages: pages * PAGE * 16), min_size=1, max_size=12).map(tuple),
    page_bytes=st.integers(1, 200_000),
    pages=st.integers(1, 300),
    token=st.integers(1, 300_000),
    fixed=st.integers(0, 1_000_000),
    head=st.sampled_from([0, 3 * MIB, 40 * MIB]),
    embedding=st.sampled_from([0, 3 * MIB, 40 * MIB]),
)


@settings(max_examples=200, deadline=None)
@given(needs, st.integers(0, 200 * MIB), st.integers(1, 600), st.integers(0, 3), st.integers(0, 2))
def test_never_over_the_budget(need: MemoryNeed, total: int, chunk: int, window: int, retain: int) -> None:
    try:
        budget = plan_budget(need, total, chunk, window, retain)
    except PlanError as error:
        smallest = int(re.findall(r"--memory (\d+)MiB would do", str(error))[0]) * MIB
        assert smallest > total
        assert plan_budget(need, smallest, chunk, window, retain).used <= smallest
        return
    assert budget.used <= total
    assert 1 <= budget.chunk <= chunk
    assert budget.pages == need.pages
    assert budget.placement.resident | set(budget.placement.ring.blocks) == set(range(len(need.blocks)))


@settings(max_examples=100, deadline=None)
@given(needs, st.integers(1, 300), st.integers(0, 1 << 20))
def test_the_context_that_would_fit_fits(need: MemoryNeed, fitting: int, more: int) -> None:
    total = minimum_bytes(need) + fitting * need.page_bytes + more % need.page_bytes
    assert affordable_pages(need, total) == fitting
    smaller = MemoryNeed(**{**vars(need), "pages": fitting})
    assert plan_budget(smaller, total).used <= total
    larger = MemoryNeed(**{**vars(need), "pages": fitting + 1})
    with pytest.raises(PlanError, match=f"a context of {32 * fitting} tokens would fit"):
        plan_budget(larger, total)


def test_a_refusal_is_one_sentence_with_the_way_out() -> None:
    with pytest.raises(PlanError) as raised:
        plan_budget(DEMAND, 150 * MIB)
    assert str(raised.value) == (
        "150MiB of memory is too little for this part of the model: --memory 207MiB would do; "
        f"at 150MiB a context of {32 * ((150 * MIB - minimum_bytes(DEMAND)) // MIB)} tokens would fit"
    )
    with pytest.raises(PlanError, match="no context would fit"):
        plan_budget(DEMAND, 100 * MIB)


@settings(max_examples=200, deadline=None)
@given(needs, st.floats(0, 1), st.integers(1, 600))
def test_enough_leaves_blocks_what_they_need(need: MemoryNeed, share: float, chunk: int) -> None:
    weights = round(share * sum(need.blocks))
    total = sufficient_budget(need, weights, chunk)
    budget = plan_budget(need, total, chunk)
    others = budget.fixed + budget.kv_bytes + budget.chunk_bytes + budget.head_bytes + min(TILE, need.embedding)
    assert total % MIB == 0
    assert total - others >= weights


@settings(max_examples=200, deadline=None)
@given(needs, st.floats(0, 1), st.integers(1, 600))
def test_a_head_that_fits_stays_and_blocks_keep_their_room(need: MemoryNeed, share: float, chunk: int) -> None:
    weights = round(share * sum(need.blocks))
    budget = plan_budget(need, budget_with_head(need, weights, chunk), chunk)
    assert budget.head_bytes >= need.head
    others = budget.fixed + budget.kv_bytes + budget.chunk_bytes + budget.head_bytes + min(TILE, need.embedding)
    assert budget.total - others >= weights
    assert share < 1 or budget.embedding_bytes >= need.embedding


@settings(max_examples=200, deadline=None)
@given(needs, st.integers(1, 3), st.integers(0, 2), st.integers(1, 600))
def test_enough_for_a_window_keeps_the_head_in_memory(need: MemoryNeed, window: int, retain: int, chunk: int) -> None:
    total = window_budget(need, window, retain, chunk)
    budget = plan_budget(need, total, chunk, window, retain)
    assert budget.head_bytes >= need.head
    assert budget.placement == place_window(need.blocks, window, retain, need.kinds)
    assert budget.used <= total


def test_enough_makes_room_for_a_head_that_then_stays() -> None:
    """With the memory in use, the head streams. Additional memory goes to the head first."""
    used, weights = plan_budget(DEMAND, 400 * MIB), 700 * MIB
    simple = used.total - used.placement.memory_bytes + weights
    assert used.head_bytes < plan_budget(DEMAND, simple).head_bytes == DEMAND.head
    assert plan_budget(DEMAND, simple).placement.memory_bytes < weights - DEMAND.head // 2
    more = plan_budget(DEMAND, sufficient_budget(DEMAND, weights))
    assert more.total - (more.used - more.placement.memory_bytes) >= weights


def test_a_prefill_chunk_shrinks_when_memory_is_tight() -> None:
    chunks = [plan_budget(DEMAND, total * MIB).chunk for total in (8000, 600, 300, 210)]
    assert chunks[0] == LONGEST_CHUNK
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] <= 32


@pytest.mark.parametrize(("pages", "chunk"), [(2, 64), (15, 480), (16, 512), (17, 512)])
def test_a_prefill_chunk_is_not_longer_than_the_context(pages: int, chunk: int) -> None:
    budget = plan_budget(MemoryNeed(**{**vars(DEMAND), "pages": pages}), 1 << 40)
    assert budget.chunk == chunk
    assert budget.chunk_bytes == chunk * DEMAND.token


def test_a_prefill_chunk_is_short_beside_little_streaming() -> None:
    everything = sum(DEMAND.blocks) + DEMAND.head + DEMAND.fixed + DEMAND.pages * DEMAND.page_bytes
    tokens = LONGEST_CHUNK * DEMAND.token
    assert plan_budget(DEMAND, everything + tokens + 2 * TILE).chunk == LONGEST_CHUNK
    assert plan_budget(DEMAND, everything - tokens).chunk == LONGEST_CHUNK // 2
    assert plan_budget(DEMAND, everything // 2).chunk == LONGEST_CHUNK
    assert plan_budget(DEMAND, everything - tokens, window=2).chunk == LONGEST_CHUNK


def test_the_head_stays_only_beside_blocks_that_can_stream() -> None:
    assert plan_budget(DEMAND, 400 * MIB).head_bytes == 2 * TILE
    assert plan_budget(DEMAND, 600 * MIB).head_bytes == 250 * MIB


def test_everything_stays_when_everything_fits() -> None:
    need = MemoryNeed(**{**vars(DEMAND), "embedding": 250 * MIB})
    budget = plan_budget(need, 6000 * MIB)
    assert budget.placement.streamed_bytes == 0
    assert budget.embedding_bytes == 250 * MIB


def test_activations_grow_with_what_the_node_holds() -> None:
    config = tiny_config()
    whole = token_bytes(config, config.heads, config.kv_heads, config.intermediate)
    half = token_bytes(config, 2, 1, 48)
    assert 4 * 5 * config.hidden < half < whole
    assert token_bytes(config, 2, 1, 48, passing=8) > half


def test_default_budget_is_some_of_what_is_free() -> None:
    assert 0 < default_budget() < 1 << 50


def test_control_groups_limit_what_is_free(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/home/laptop\n3:cpu:/\n0::/home/laptop\n")
    for folder, limit, usage in (
        ("memory/home/laptop", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("home", "memory.max", "memory.current"),
        ("home/laptop", "memory.max", "memory.current"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / limit).write_text("max\n" if folder == "home/laptop" else "3000\n")
        (tmp_path / folder / usage).write_text("1000\n")
    assert list(_group_limits(tmp_path, own)) == [2000, 2000]
    assert list(_group_limits(tmp_path, tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("inactive", "active", "mapped", "free"),
    [(600, 0, 0, 2600), (1000, 0, 0, 3000), (1001, 0, 0, 3000), (300, 500, 100, 2700), (300, 500, 700, 2300)],
)
def test_file_pages_that_a_control_group_can_drop_are_free(
    tmp_path: Path, inactive: int, active: int, mapped: int, free: int
) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/\n0::/\n")
    (tmp_path / "memory").mkdir()
    for file in ("memory/memory.limit_in_bytes", "memory.max"):
        (tmp_path / file).write_text("3000\n")
    for file in ("memory/memory.usage_in_bytes", "memory.current"):
        (tmp_path / file).write_text("1000\n")
    (tmp_path / "memory" / "memory.stat").write_text(
        f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\ntotal_mapped_file {mapped}\n"
    )
    (tmp_path / "memory.stat").write_text(
        f"anon 1\ninactive_file {inactive}\nactive_file {active}\nfile_mapped {mapped}\n"
    )
    assert list(_group_limits(tmp_path, own)) == [free, free]


def test_damaged_statistics_of_a_control_group_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    for file, content in (("memory.max", "3000"), ("memory.current", "1000"), ("memory.stat", "inactive_file many\n")):
        (tmp_path / file).write_text(content)
    assert list(_group_limits(tmp_path, tmp_path / "cgroup")) == [2000]


def test_the_parts_of_several_processes_fit_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(mib: int, others: int) -> int:
        monkeypatch.setattr("scheduler.free._group_limits", lambda root, own: [mib * MIB])
        return default_budget(others)

    assert 100 * MIB < free(125, 0) < 125 * MIB
    for others in (1, 2, 3):
        assert 0 < free(256, others) * (1 + others) < (256 - 26 * others) * MIB
    assert free(60, 3) == 0
