"""Rings of stages: how much time of a node's disk its visits save, compared with a simulation of the disk."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.home.layouts import evaluate, layouts
from scheduler.model.home.problem import Members
from scheduler.model.home.rings import best_ring, evaluate_ring
from scheduler.model.home.stages import Layout
from tests.support.homes import MB, home

Stages = list[tuple[int, int, Members]]


def rounds(count: int, nodes: int, layers: int = 32) -> Stages:
    """Return equal stages: all nodes one after the other, `count` times."""
    ends = [layers * at // (count * nodes) for at in range(count * nodes + 1)]
    return [(first, last, (at % nodes,)) for at, (first, last) in enumerate(pairwise(ends))]


def laid(stages: Stages, room: int, nodes: int = 4, speed: float = 4e9) -> Layout:
    found = evaluate(home([speed] * nodes, 0.001, layers=32, rooms=[10 * MB + room] * nodes), stages)
    assert found is not None
    return found


@given(st.integers(60, 400), st.sampled_from([0.5e9, 4e9]))
@settings(max_examples=20, deadline=None)
def test_a_ring_of_one_visit_is_a_row_of_stages(room: int, speed: float) -> None:
    problem = home([speed] * 4, 0.001, layers=32, rooms=[10 * MB + room * MB] * 4)
    row, ring = (form(problem, rounds(1, 4)) for form in (evaluate, evaluate_ring))
    assert row is not None
    assert ring is not None
    assert (ring.seconds, ring.disk) == pytest.approx((row.seconds, row.disk))


def test_more_visits_wait_less_for_disks_and_take_more_hops() -> None:
    found = [laid(rounds(visits, 4), 100 * MB) for visits in (1, 2, 4)]
    assert all(more.disk < less.disk for less, more in pairwise(found))
    assert all(more.hops > less.hops for less, more in pairwise(found))
    assert all(each.compute == pytest.approx(found[0].compute) for each in found)
    assert found[0].in_flight == 4
    assert found[1].in_flight == 1
    assert found[2].members == (0, 1, 2, 3)
    assert found[2].seconds == pytest.approx(found[2].step(1))


def test_without_a_shortage_a_ring_only_adds_hops() -> None:
    row, ring = (laid(rounds(visits, 4), 1 << 40) for visits in (1, 4))
    assert (row.disk, ring.disk) == (0.0, 0.0)
    assert ring.seconds - row.seconds == pytest.approx(12 * 0.001)


@pytest.mark.parametrize("visits", [1, 2, 4])
def test_waits_reach_a_part_of_what_the_best_memory_set_aside_gives(visits: int) -> None:
    found = laid(rounds(visits, 4), room=100 * MB)
    own = [stage for stage in found.stages if stage.split.members == (3,)]
    parts = [found.problem.part(stage.first, stage.last, (3,)) for stage in own]
    weights, kept = (
        sum(kind.units * getattr(kind, what) for part in parts for kind in part.kinds) / MB
        for what in ("nbytes", "kv_bytes")
    )
    busy = [stage.split.compute for stage in own]
    waits = sum(stage.split.disk for stage in own)
    gap = (found.seconds - sum(busy) - waits) / visits
    every = [waited(weights, 100 - kept, ahead, busy, gap) for ahead in range(int(100 - kept))]
    assert waits == pytest.approx(0.6 * every[0] + 0.4 * min(every), abs=0.02 * found.seconds)


def waited(weights: float, room: float, ahead: int, busy: list[float], gap: float) -> float:
    """Return the seconds of waiting in a token, in the long run; sizes in MB.

    A part of each visit's weights stays in memory. The disk, with 200 MB/s, reads up to `ahead` of the others in the
    gap before the visit, and the rest while the visit computes.
    """
    read = weights / len(busy) - (room - ahead) / len(busy)
    before = min(ahead, 200 * gap)
    return sum(max(0.0, (read - before) / 200 - seconds) for seconds in busy)


def test_a_ring_is_chosen_where_it_is_fastest() -> None:
    """Sums take too long here. In a row of stages, each disk reads while the other disks are idle."""
    problem = home([4e9] * 4, 0.02, layers=32, rooms=[10 * MB + 150 * MB] * 4)
    best, *others = layouts(problem)
    assert best.ring
    assert best.members == (0, 1, 2, 3)
    assert best.seconds < 0.97 * min(each.seconds for each in others)
    assert not any(each.ring for each in others)
    assert not any(each.ring for each in layouts(problem, several=False))
    near = replace(problem, exchange=lambda members, tokens: 1e-5)
    assert not layouts(near)[0].ring


def test_a_ring_deals_layers_so_that_all_disks_take_equally_long() -> None:
    problem = home([4e9] * 3, 0.02, layers=40, rooms=[10 * MB + room * MB for room in (100, 300, 100)])
    nodes = (*problem.nodes[:2], replace(problem.nodes[2], disk=0.4e9))
    problem = replace(problem, nodes=nodes)
    row = evaluate(problem, rounds(1, 3, 40))
    assert row is not None
    ring = best_ring(problem, row, 1)
    assert ring is not None
    held = {
        rank: sum(each.last - each.first for each in ring.stages if each.split.members == (rank,)) for rank in range(3)
    }
    assert 1.4 * held[0] < min(held[1], held[2])  # the one has more memory, the other a faster disk
    assert sum(held.values()) == 40
    roomy = replace(problem, nodes=tuple(replace(each, memory=1 << 40) for each in nodes))
    plenty = evaluate(roomy, rounds(1, 3, 40))
    assert plenty is not None
    assert best_ring(roomy, plenty, 1) is None
