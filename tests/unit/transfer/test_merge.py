"""Rings of several memories as one: the order of use, no overwritten use, and every possible order of loads."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.ring import EMPTY, Ring, smallest
from scheduler.slots.cycle import Cycle
from scheduler.transfer.merge import merge_rings
from tpi.devices.pages import PAGE


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[int], list[int], list[Ring]]:
    """Draw the sizes of segments, the card of each, and the ring of each card; some cards have no segments."""
    sizes = [PAGE * draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 12)))]
    cards = [draw(st.integers(0, 2)) for _ in sizes]
    depth = draw(st.integers(1, 4))
    mine = [[segment for segment, card in enumerate(cards) if card == number] for number in range(3)]
    return sizes, cards, [smallest(segments, sizes, depth) for segments in mine]


@given(rings())
def test_segments_follow_in_order_in_slots_of_their_own_ring(
    case: tuple[list[int], list[int], list[Ring]],
) -> None:
    sizes, cards, parts = case
    ring = merge_rings(parts, sizes)
    assert list(ring.blocks) == list(range(len(sizes))) * (len(ring.blocks) // len(sizes))
    assert ring.size == sum(part.size for part in parts)
    for segment, offset in zip(ring.blocks, ring.offsets, strict=True):
        assert (segment, offset) in set(zip(parts[cards[segment]].blocks, parts[cards[segment]].offsets, strict=True))


@given(rings())
def test_no_use_overlaps_another_or_waits_for_a_later_one(
    case: tuple[list[int], list[int], list[Ring]],
) -> None:
    """Before every hold, loads run as far as they can: loaded uses do not overlap, and the next use is loaded."""
    sizes, cards, parts = case
    ring = merge_rings(parts, sizes)
    cycle, period = Cycle(ring), len(ring.blocks)
    for use in range(2 * period):
        while cycle.may_open(cycle.tail):
            cycle.tail += 1
        assert cycle.tail > use
        there = [(cards[ring.blocks[at % period]], ring.offsets[at % period], at) for at in range(use, cycle.tail)]
        for card, offset, at in there:
            end = offset + sizes[ring.blocks[at % period]]
            assert not any(
                other == card and begin < end and offset < begin + sizes[ring.blocks[later % period]]
                for other, begin, later in there
                if later > at
            )
        cycle.pin(use)
        cycle.unpin(use)


def test_rings_with_nothing_are_nothing() -> None:
    assert merge_rings([EMPTY, EMPTY], []) == EMPTY
