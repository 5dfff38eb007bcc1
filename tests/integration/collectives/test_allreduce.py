"""Collectives: every algorithm, over 1 to 9 nodes, all sizes and wire formats, gives the sum that it promises."""

from time import sleep

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from allreduce import connections
from allreduce._mailbox import quantise
from allreduce.base import F32, Endpoints, Group, GroupSpec, GroupStats, Peer, open_group
from tests.support.cluster.collective_helpers import House, partials_of, run_group
from tpi.errors import UsageError
from tpi.net.wire import wire_format

ORDERED = ["star", "mesh", "two-shot", "shared", "loopback"]
UNORDERED = ["tree", "ring"]


def in_rank_order(partials: list[F32]) -> F32:
    total: F32 = partials[0].copy()
    for partial in partials[1:]:
        np.add(total, partial, out=total)
    return total


def decoded(values: F32, wire: str) -> F32:
    """Return `values` after they were sent in the format `wire`."""
    out: F32 = values.copy()
    quantise(out, wire_format(wire).code)
    return out


@pytest.mark.parametrize("name", ORDERED + UNORDERED + ["auto"])
@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 9), count=st.sampled_from([1, 2, 31, 32, 33, 576, 4096, 70_001]), seed=st.integers(0, 9))
def test_f32_sum(name: str, size: int, count: int, seed: int) -> None:
    partials = partials_of(size, count, seed)

    def node(group: Group) -> tuple[F32, F32 | None, F32]:
        first = group.allreduce(partials[group.rank]).copy()
        group.begin(2)
        second = group.reduce(partials[group.rank])
        second = None if second is None else second.copy()
        group.begin(3)
        return first, second, group.allreduce(partials[group.rank]).copy()

    results = run_group(name, size, node)
    expected = in_rank_order(partials)
    for rank, (first, second, third) in enumerate(results):
        assert (second is None) == (rank > 0)
        np.testing.assert_array_equal(first, third)
        np.testing.assert_array_equal(first, results[0][0])
        if name in ORDERED:
            np.testing.assert_array_equal(first, expected)
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
    assert results[0][1] is not None
    np.testing.assert_allclose(results[0][1], expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", [*ORDERED, *UNORDERED, "auto", "torch"])
@pytest.mark.parametrize("wire", ["f32", "bf16", "q8"])
def test_two_sums_under_way_are_what_they_are_one_by_one(name: str, wire: str) -> None:
    """A different node is late each time, so that the sums of the other nodes wait for it."""
    if name == "torch":
        pytest.importorskip("torch")
    size, sums = 3, 8
    partials = [partials_of(size, 300 + 7 * number, number) for number in range(sums)]

    def one_by_one(group: Group) -> list[F32]:
        return [group.allreduce(each[group.rank]).copy() for each in partials]

    def overlapped(group: Group) -> list[F32 | None]:
        totals: list[F32 | None] = []
        for number, each in enumerate(partials):
            if number % size == group.rank:
                sleep(0.01)
            group.start(each[group.rank], everywhere=number < sums - 1)
            if number:
                total = group.finish()
                assert total is not None
                totals.append(total.copy())
        last = group.finish()
        return [*totals, None if last is None else last.copy()]

    expected = run_group(name, size, one_by_one, wire=wire)
    for rank, totals in enumerate(run_group(name, size, overlapped, wire=wire)):
        assert (totals[-1] is None) == (rank > 0)
        for total, wanted in zip(totals[:-1], expected[rank], strict=False):
            np.testing.assert_array_equal(total, wanted)


def test_three_sums_at_once_are_refused() -> None:
    partial = partials_of(size=1, count=10)[0]
    alone = open_group("star", GroupSpec(0, 1, 1, (Peer(0, "alone"),)), Endpoints())
    alone.begin(1)
    alone.start(partial)
    alone.start(partial)
    with pytest.raises(RuntimeError, match="2 sums"):
        alone.start(partial)
    alone.begin(2)  # which forgets them
    np.testing.assert_array_equal(alone.allreduce(partial), partial)


def test_torch_distributed_sums() -> None:
    pytest.importorskip("torch")
    partials = partials_of(size=3, count=1000)
    results = run_group("torch", 3, lambda group: (group.allreduce(partials[group.rank]).copy(), group.rank))
    for total, _ in results:
        np.testing.assert_array_equal(total, results[0][0])
        np.testing.assert_allclose(total, in_rank_order(partials), rtol=1e-4)


@pytest.mark.parametrize("name", ["star", "mesh", "two-shot", "ring", "tree", "shared"])
def test_a_million_values(name: str) -> None:
    partials = partials_of(size=3, count=1_000_000)
    results = run_group(name, 3, lambda group: group.allreduce(partials[group.rank]).copy())
    for total in results:
        np.testing.assert_array_equal(total, results[0])
    assert np.abs(results[0] - in_rank_order(partials)).max() < 1e-3 * np.abs(results[0]).max()


@pytest.mark.parametrize("wire", ["bf16", "q8"])
@pytest.mark.parametrize("name", ["star", "mesh", "two-shot", "ring", "tree"])
def test_all_members_hold_the_same_bits_in_a_quantised_wire(name: str, wire: str) -> None:
    partials = partials_of(size=5, count=1000)
    results = run_group(name, 5, lambda group: group.allreduce(partials[group.rank]).copy(), wire=wire)
    for total in results:
        np.testing.assert_array_equal(total, results[0])
    if name in ("star", "mesh"):  # every rank's partial is used as the others decode it, its own included
        np.testing.assert_array_equal(results[0], in_rank_order([decoded(partial, wire) for partial in partials]))
    largest = max(np.abs(partial).max() for partial in partials)
    assert np.abs(results[0] - in_rank_order(partials)).max() < 0.05 * largest


@pytest.mark.parametrize("wire", ["bf16", "q8"])
@settings(max_examples=30, deadline=None)
@given(values=hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32)))
def test_what_travels_is_what_the_wire_format_says_to_the_bit(wire: str, values: F32) -> None:
    """The values include huge and tiny ones, infinities and NaN."""
    partials = [np.zeros((1, values.size), np.float32), values.reshape(1, -1)]
    for total in run_group("mesh", 2, lambda group: group.allreduce(partials[group.rank]).copy(), wire=wire):
        np.testing.assert_array_equal(total, decoded(partials[1], wire))


@pytest.mark.parametrize("bad", [np.ones((2, 8), np.float64), np.ones((8, 2), np.float32).T])
def test_what_is_no_contiguous_float32_is_refused(bad: F32) -> None:
    with House(2) as house:
        group = house.join("star", 0)
        with pytest.raises((TypeError, ValueError, BufferError), match=r"float32|contiguous"):
            group.allreduce(bad)
        group.close()


def test_a_single_node_gets_its_own_partial_back() -> None:
    partial = partials_of(size=1, count=10)[0]
    alone = run_group("star", 1, lambda group: (group.name, group.allreduce(partial).tolist()))
    assert alone == [("loopback", partial.tolist())]


def test_an_unknown_collective_lists_the_alternatives() -> None:
    with House(2) as house, pytest.raises(UsageError, match="star, mesh, two-shot"):
        house.join("butterfly", 0)


def test_stats_count_what_travels() -> None:
    partials = partials_of(size=2, count=1000)

    def node(group: Group) -> GroupStats:
        group.allreduce(partials[group.rank])
        group.allreduce(partials[group.rank])
        return group.stats

    for stats in run_group("star", 2, node):
        assert (stats.exchanges, stats.sent_bytes, stats.received_bytes, stats.dropped) == (2, 8064, 8064, 0)
        assert stats.seconds > 0


@pytest.mark.parametrize("name", ["mesh", "two-shot"])
def test_messages_longer_than_all_queues_do_not_block_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SEGMENT_VALUES", 64)
    partials = partials_of(size=3, count=64 * 400)
    for total in run_group(name, 3, lambda group: group.allreduce(partials[group.rank]).copy()):
        np.testing.assert_array_equal(total, in_rank_order(partials))
