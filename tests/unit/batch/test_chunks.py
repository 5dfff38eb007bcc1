"""Chunks of experts: every unit of a block is in its table once, and slots of the ring never overlap while held."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.ring import Ring
from scheduler.slots.cycle import Cycle
from tpi.devices.pages import PAGE, Bytes, round_up
from tpi.kernels.spec import SHARED
from tpi.pack.layout import Part, RunLayout
from tpi.partition import Range, by_expert, expert_ranges
from worker.node_plan import NodeBlock, NodeLayer, RunUnits
from worker.pipelines.chunktable import ChunkTable, TableEntry, entries
from worker.plan.chunks import Chunking, pieces_of
from worker.plan.modes.batch import chunk_bytes
from worker.plan.offload import OffloadPlan
from worker.plan.places import through_accelerator
from worker.plan.segments import NodeSegment

HIDDEN = 24
F32 = 4  # bytes


@dataclass(frozen=True)
class Drawn:
    """A plan, and the number of experts in its blocks."""

    plan: OffloadPlan
    chunking: Chunking
    experts: int


def run_of(name: Any, units: int, width: int, ranges: list[Range]) -> tuple[RunUnits, ...]:
    layout = RunLayout(name, "record", (Part("up", "f32", "row"), Part("down", "f32", "column")), width, HIDDEN, units)
    return tuple(RunUnits(layout, each, b"") for each in ranges)


@st.composite
def plans(draw: st.DrawFn) -> Drawn:
    """Draw plans for the attention and experts of one of several nodes, with whole experts or slices."""
    experts, each = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    first, last = sorted(draw(st.tuples(st.integers(0, each), st.integers(0, each))))
    some = sorted(draw(st.tuples(st.integers(0, experts), st.integers(0, experts))))
    own = draw(st.sampled_from([Range(0, experts), Range(*some)]))
    beside, attention = draw(st.integers(0, 3)), draw(st.integers(1, 9))
    layers = []
    for number in range(draw(st.integers(1, 5))):
        routed = run_of("neuron", experts * each, 2, expert_ranges(own, Range(first, last), each))
        shared = run_of("shared", 3, 3, [Range(0, beside)]) if draw(st.booleans()) else ()
        query = run_of("query", attention, 5, [Range(0, attention)])
        blocks = (
            NodeBlock(2 * number, number, "attention", 0, query),
            NodeBlock(2 * number + 1, number, "experts", 1, (*shared, *routed)),
        )
        layers.append(NodeLayer(number, blocks))
    chunking = Chunking(draw(st.integers(1, 12)), draw(st.sampled_from([1, 2000])))
    nothing: Any = None
    own_plan: Any = SimpleNamespace(layers=layers)
    pieces, kept = pieces_of(own_plan, draw(st.floats(0, 1)), chunking)
    passing = frozenset(range(len(pieces))) - kept
    plan = OffloadPlan(pieces, kept, passing, passing, 1, "ram", 2, 0, nothing, nothing, 1, chunked=True)
    return Drawn(plan, chunking, experts)


def blocks_of(plan: OffloadPlan) -> list[tuple[NodeSegment, ...]]:
    """Return the pieces that a step uses, for each block."""
    window = [plan.pieces[number] for number in plan.host_pieces]
    return list(through_accelerator(plan, window, range(len(window))).long)


@given(plans())
@settings(max_examples=300, deadline=None)
def test_every_unit_of_a_block_is_in_its_table_once(drawn: Drawn) -> None:
    for segments in blocks_of(drawn.plan):
        block = segments[0].block
        if block.kind != "experts":
            continue
        (segment,) = segments  # one segment, and with it one call
        wanted = sorted((run.name, unit) for run in block.runs for unit in range(run.units.first, run.units.last))
        found = [(run.name, unit) for run in segment.runs for unit in range(run.units.first, run.units.last)]
        assert sorted(found) == wanted
        if not segment.parts:
            continue
        table = list(entries(segment.parts, drawn.experts))
        assert [entry.piece for entry in table if entry.piece != SHARED] == list(range(_routed(segment, drawn.experts)))
        assert [entry.piece for entry in table].count(SHARED) == any(name == "shared" for name, _ in wanted)
        for at, part in enumerate(segment.parts):
            slices = [entry.place for entry in table if entry.part == at]
            assert [each.start for each in slices] == [0, *(each.stop for each in slices[:-1])]
            assert slices[-1].stop == part.nbytes


def _routed(segment: NodeSegment, experts: int) -> int:
    """Return pieces of routed experts, as kernels get them (`tpi.block.experts_spec`)."""
    runs = [run for run in segment.runs if run.name == "neuron"]
    return sum(len(by_expert(run.units, run.layout.units // experts)) for run in runs)


@given(plans())
@settings(max_examples=200, deadline=None)
def test_there_is_one_even_chunk_for_each_micro_batch(drawn: Drawn) -> None:
    plan = drawn.plan
    for layer in plan._passing:
        chunks = [plan.pieces[at] for at in layer if plan.pieces[at].runs[0].name == "neuron"]
        if not chunks:
            continue
        unit = chunks[0].runs[0].layout.unit_bytes
        sizes = [chunk.nbytes for chunk in chunks]
        assert max(sizes) - min(sizes) <= unit
        assert max(sizes) <= chunk_bytes(plan, drawn.chunking)
        wanted = min(sum(sizes) // unit, drawn.chunking.count)
        assert len(chunks) <= wanted
        others = sum(plan.pieces[at].nbytes for at in layer) - sum(sizes)
        assert len(chunks) == wanted or others or drawn.chunking.least > 1
        assert len({plan.piece_name(at) for at in layer}) == len(layer)


@given(plans(), st.randoms())
@settings(max_examples=200, deadline=None)
def test_ring_slots_do_not_overlap_while_held_or_loaded(drawn: Drawn, random: Any) -> None:
    """Steps hold the chunks of a layer together, and loads run as far ahead as they may."""
    plan = drawn.plan
    ring = plan.ring(plan.long)
    passing = [sum(plan.pieces[at].nbytes for at in layer) for layer in plan._passing]
    assert ring.size <= 2 * max(map(round_up, passing), default=0) + 4 * PAGE
    assert ring.size == plan.ring_bytes(1)
    cycle, live = Cycle(ring), set[int]()
    for layer in plan._passing * 7:
        for piece in layer:
            use = cycle.next_use(piece)
            _load(cycle, ring, plan, live)
            assert use < cycle.tail
            cycle.pin(use)
        pinned = sorted(use for use in live if cycle.is_pinned(use))
        random.shuffle(pinned)
        for use in pinned:  # each chunk is given back by itself
            cycle.unpin(use)
            live.discard(use)
            _load(cycle, ring, plan, live)


def _load(cycle: Cycle, ring: Ring, plan: OffloadPlan, live: set[int]) -> None:
    while cycle.may_open(cycle.tail):
        live.add(cycle.tail)
        cycle.tail += 1
    places = sorted((_begin(ring, use), _begin(ring, use) + plan.pieces[_piece(ring, use)].nbytes) for use in live)
    assert all(one[1] <= other[0] for one, other in pairwise(places))
    assert all(end <= ring.size for _, end in places)


def _begin(ring: Ring, use: int) -> int:
    return ring.offsets[use % len(ring.offsets)]


def _piece(ring: Ring, use: int) -> int:
    return ring.blocks[use % len(ring.blocks)]


class CountedPart:
    """A hold that counts its uses, or fails."""

    def __init__(self, value: int) -> None:
        self.data, self.held, self.fails = np.full(4, value, np.uint8), 0, False

    def __enter__(self) -> Bytes:
        if self.fails:
            raise OSError("a copy failed")
        self.held += 1
        return self.data

    def __exit__(self, *error: object) -> None:
        self.held -= 1


def test_a_table_is_of_what_is_held_now_and_gives_all_of_it_back() -> None:
    first, second = CountedPart(1), CountedPart(2)
    hold = ChunkTable([first, second], [TableEntry(0, 1, slice(1, 3)), TableEntry(1, 0, slice(0, 4))])
    with hold:
        assert {piece: data.tolist() for piece, data in hold.held.items()} == {0: [2, 2], 1: [1, 1, 1, 1]}
        earlier = hold.held
    second.data = np.full(4, 3, np.uint8)  # the other place of the ring
    with hold:
        assert hold.held[0].tolist() == [3, 3]
        assert earlier[0].tolist() == [2, 2]  # a call that was started with them still has them
    second.fails = True
    for _ in range(2):
        with pytest.raises(OSError, match="a copy failed"), hold:
            pass
        assert (first.held, second.held) == (0, 0)
