"""Rings and placements: no overlap with blocks in use, never above the budget, never slower with more memory."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.placement import Placement, Speeds, place, place_window, spread
from scheduler.model.ring import Ring, layouts, neighbours, smallest
from scheduler.model.timeline import simulate
from tpi.devices.pages import PAGE
from tpi.errors import PlanError

page_sizes = st.lists(st.integers(1, 12).map(lambda pages: pages * PAGE), min_size=1, max_size=14)
quick = settings(max_examples=150, deadline=None)


def check(ring: Ring, sizes: list[int]) -> None:
    """Check that every use is inside the ring, and does not overlap uses that may be in memory with it."""
    period = len(ring.blocks)
    for use, (block, offset, lag) in enumerate(zip(ring.blocks, ring.offsets, ring.lags, strict=True)):
        assert 0 <= offset <= ring.size - sizes[block]
        for back in range(1, lag):
            other = (use - back) % period
            end = ring.offsets[other] + sizes[ring.blocks[other]]
            assert end <= offset or offset + sizes[block] <= ring.offsets[other]


@quick
@given(page_sizes, st.integers(0, 40))
def test_blocks_in_memory_together_never_overlap(sizes: list[int], spare: int) -> None:
    blocks = list(range(len(sizes)))
    found = layouts(blocks, sizes, max(sizes) + spare * PAGE)
    assert found
    for ring in found:
        check(ring, sizes)
        assert ring.depth >= 1
    assert not layouts(blocks, sizes, max(sizes) - 1)


@quick
@given(page_sizes)
def test_loads_overlap_computing_with_two_neighbours(sizes: list[int]) -> None:
    pair = neighbours(sizes, 2)
    rings = layouts(list(range(len(sizes))), sizes, pair)
    if len(sizes) > 1:
        assert max(ring.depth for ring in rings) >= 2
        assert smallest(list(range(len(sizes))), sizes, 2).size == pair


@quick
@given(page_sizes, st.integers(1, 6))
def test_the_smallest_ring_has_the_depth_asked_for(sizes: list[int], depth: int) -> None:
    ring = smallest(list(range(len(sizes))), sizes, depth)
    check(ring, sizes)
    assert ring.depth >= min(depth, len(sizes))
    assert neighbours(sizes, depth) <= ring.size <= depth * max(sizes)


@quick
@given(page_sizes, st.floats(0, 1.2))
def test_a_placement_never_exceeds_its_budget(sizes: list[int], share: float) -> None:
    budget = int(sum(sizes) * share)
    if budget < max(sizes):
        with pytest.raises(PlanError, match=str(max(sizes))):
            place(sizes, budget)
        return
    placement = place(sizes, budget)
    check(placement.ring, sizes)
    assert placement.memory_bytes <= budget
    assert set(placement.ring.blocks) | placement.resident == set(range(len(sizes)))
    assert not set(placement.ring.blocks) & placement.resident
    assert placement.resident_bytes + placement.streamed_bytes == sum(sizes)


LLAMA = [9216 * PAGE, 33792 * PAGE] * 22  # the 1.1B shape in f32


def seconds(placement: Placement, speeds: Speeds) -> float:
    return simulate(placement.ring, speeds.costs(placement.sizes), 12).steady_token


@pytest.mark.parametrize("exchange", [0.0, 0.005])
def test_more_memory_is_never_slower(exchange: float) -> None:
    speeds = Speeds(exchange=exchange)
    shares = [0.05 * step for step in range(1, 21)]
    times = [seconds(place(LLAMA, int(sum(LLAMA) * share), speeds), speeds) for share in shares]
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(times))
    assert times[-1] < 0.1 * times[0] or exchange


@pytest.mark.parametrize("share", [0.12, 0.25, 0.5, 0.75, 0.9])
def test_streaming_is_near_what_the_disk_allows(share: float) -> None:
    speeds = Speeds()
    placement = place(LLAMA, int(sum(LLAMA) * share), speeds)
    floor = max(placement.streamed_bytes / speeds.disk, sum(LLAMA) / speeds.compute)
    assert floor / seconds(placement, speeds) > 0.9


def test_a_long_turn_between_tokens_is_loaded_in() -> None:
    """With one block in memory, nothing loads in this time.

    Then two blocks, with a little more streamed, are faster.
    """
    speeds = Speeds(disk=1.5e9, compute=25e9, turn=0.03)
    budget = int(sum(LLAMA) * 0.93)
    patient, hasty = place(LLAMA, budget, speeds), place(LLAMA, budget, replace(speeds, turn=0.0))
    assert (patient.ring.depth, hasty.ring.depth) == (2, 1)
    assert seconds(patient, speeds) < 0.97 * seconds(hasty, speeds)


def test_what_stays_is_evenly_spaced() -> None:
    assert spread(range(10), 3) == [1, 5, 8]
    assert spread(range(4), 4) == [0, 1, 2, 3]
    assert spread(range(4), 0) == []
    placement = place(LLAMA, int(sum(LLAMA) * 0.3))
    gaps = sorted(placement.resident)
    assert max(b - a for a, b in pairwise(gaps)) <= 2 * len(LLAMA) / len(gaps) + 2


def test_window_and_retention_as_in_the_paper() -> None:
    sizes = [64 * PAGE, 129 * PAGE] * 32
    assert place_window(sizes, 2).memory_bytes == (64 + 129) * PAGE
    assert place_window(sizes, 4).memory_bytes == 2 * (64 + 129) * PAGE
    retained = place_window(sizes, 2, 8)
    assert retained.resident == {15, 31, 47, 63}
    assert retained.memory_bytes == (4 * 129 + 64 + 129) * PAGE
