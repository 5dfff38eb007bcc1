"""The arithmetic of splits: contiguous, complete, close to the shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.deployment.planner import Units, deal_shards, parse_split
from tests.support.weights.configs import tiny_config
from tpi.errors import PlanError, UsageError
from tpi.partition import Range, deal, kv_range


@given(st.integers(1, 300), st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_deal_covers_every_unit_once_in_rank_order(units: int, shares: list[float]) -> None:
    holders = sum(share > 0 for share in shares)
    if not 0 < holders <= units:
        with pytest.raises(PlanError):
            deal(units, shares)
        return
    ranges = deal(units, shares)
    assert [unit for part in ranges for unit in range(part.first, part.last)] == list(range(units))
    assert all((len(part) > 0) == (share > 0) for part, share in zip(ranges, shares, strict=True))


@given(st.integers(1, 300), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_deal_is_within_one_unit_of_exact_shares(units: int, shares: list[int]) -> None:
    exact = [units * share / sum(shares) for share in shares]
    if min(exact) < 1:
        return
    counts = [len(part) for part in deal(units, shares)]
    assert all(abs(count - part) <= 1 for count, part in zip(counts, exact, strict=True))


@pytest.mark.parametrize(("nodes", "expected"), [(2, [5, 4]), (4, [3, 2, 2, 2]), (5, [2, 2, 2, 2, 1])])
def test_nine_heads(nodes: int, expected: list[int]) -> None:
    assert sorted((len(part) for part in deal(9, [1] * nodes)), reverse=True) == expected


def test_a_cut_kv_group_is_kept_on_both_sides() -> None:
    # 9 query heads, 3 KV heads: group 0 is heads 0-2
    assert kv_range(Range(0, 2), 1, 1, 9, 3) == Range(0, 1)
    assert kv_range(Range(2, 5), 1, 1, 9, 3) == Range(0, 2)
    assert kv_range(Range(4, 4), 1, 1, 9, 3) == Range(0, 0)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_kv_range_holds_exactly_what_the_query_heads_attend_to(group: int, kv_heads: int, data: st.DataObject) -> None:
    heads = group * kv_heads
    first = data.draw(st.integers(0, heads - 1))
    last = data.draw(st.integers(first + 1, heads))
    needed = {head // group for head in range(first, last)}
    held = kv_range(Range(first, last), 1, 1, heads, kv_heads)
    assert set(range(held.first, held.last)) == needed


def test_more_nodes_than_units_names_both() -> None:
    with pytest.raises(PlanError, match=r"9 query-head units, too few for 10 nodes"):
        deal_shards(tiny_config(heads=9, kv_heads=3), Units(9, 3, 20, 1, 1), [1.0] * 10)


def test_a_share_of_zero_holds_nothing() -> None:
    shards = deal_shards(tiny_config(heads=9, kv_heads=3), Units(9, 3, 20, 1, 1), [1, 0, 2])
    assert [len(part) for part in (shards[1].query, shards[1].kv, shards[1].ffn)] == [0, 0, 0]
    assert len(shards[0].query) == 3
    assert len(shards[2].query) == 6


@pytest.mark.parametrize(
    ("text", "says"), [("eqal", "neither equal, auto nor a list of numbers"), ("1,2", "2 shares for 3 nodes")]
)
def test_bad_split(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_split(text, 3)
