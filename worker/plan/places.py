"""The segments that a step computes, block by block: on which device, and where its weights lie then, as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from worker.plan.offload import OffloadPlan
from worker.plan.segments import NodeSegment, join

Source = Literal["window", "kept", "ring", "parts"]
"""Where a segment's weights lie when it is computed.

"window": in the host's window. "kept": resident in its device's memory. "ring": in an accelerator's ring. "parts": in
several of these places.
"""


@dataclass(frozen=True)
class Place:
    """One segment of a block, which names the device that computes it, and the place of its weights.

    If the source is "parts", the segment's runs are those of `parts`, one after the other.
    """

    segment: NodeSegment
    source: Source
    number: int  # index into the window's segments, the resident segments, all pieces, or the blocks, by source
    parts: "tuple[Place, ...]" = ()


Visits = tuple[tuple[Place, ...], ...]
"""The segments of each block, in the order in which they are started: those on accelerators before the host's."""


@dataclass(frozen=True)
class StreamedRange:
    """A segment that is streamed through the ring: `nbytes` bytes from `begin` on of the window's segment `number`."""

    number: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class Places:
    """The segments that a node's long and short steps compute, and where their weights lie."""

    long: Visits
    short: Visits
    kept: tuple[NodeSegment, ...] = ()  # resident in the memory of their devices
    fed: tuple[StreamedRange, ...] = ()  # streamed through the ring, in order of use


def on_the_host(segments: Sequence[NodeSegment]) -> Places:
    """Return places with each of `segments` in the host's window."""
    visits = _by_block(Place(segment, "window", number) for number, segment in enumerate(segments))
    return Places(visits, visits)


def through_accelerator(offload: OffloadPlan, window: Sequence[NodeSegment], numbers: Sequence[int]) -> Places:
    """Return the places of a node with accelerators: resident, streamed, or computed by the host.

    Args:
        offload: which pieces are resident, and which are streamed in long and in short steps.
        window: the segments of the host's window.
        numbers: for each piece of `offload.host_pieces`, the index in `window` of the segment that contains it.
    """
    kept, part_of = join(offload.pieces, offload.kept)
    chosen = [kept[number] for number in dict.fromkeys(part_of[piece] for piece in sorted(offload.kept))]
    stay = [Place(segment, "kept", number) for number, segment in enumerate(chosen)]
    within = dict(zip(offload.host_pieces, numbers, strict=True))
    ring = {piece: Place(offload.pieces[piece], "ring", piece) for piece in offload.streamed_pieces}

    def visits(streamed: frozenset[int]) -> Visits:
        hosted = (Place(window[number], "window", number) for piece, number in within.items() if piece not in streamed)
        found = _by_block([*stay, *(ring[piece] for piece in sorted(streamed)), *dict.fromkeys(hosted)])
        return tuple(_gathered(block) for block in found) if offload.chunked else found

    return Places(
        long=visits(offload.long),
        short=visits(offload.short),
        kept=tuple(chosen),
        fed=tuple(
            _fed(offload.pieces[piece], window[within[piece]], within[piece]) for piece in offload.streamed_pieces
        ),
    )


def _fed(piece: NodeSegment, whole: NodeSegment, number: int) -> StreamedRange:
    return StreamedRange(number, whole.before(piece), piece.nbytes)


def _gathered(block: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return a block of experts as one segment whose parts lie in several places; any other block is returned as is.

    One kernel call then computes all experts, wherever they lie.
    """
    first = block[0].segment
    if first.block.kind != "experts" or len(block) == 1:
        return block
    runs = tuple(run for place in block for run in place.segment.runs)
    return (Place(replace(first, runs=runs), "parts", first.block.number, block),)


def _by_block(places: Iterable[Place]) -> Visits:
    """Return `places` by block, accelerators first, so that the host computes at the same time as they do."""
    blocks: dict[int, list[Place]] = {}
    for place in places:
        blocks.setdefault(place.segment.block.number, []).append(place)
    ordered = (sorted(blocks[number], key=lambda place: place.segment.device == 0) for number in sorted(blocks))
    return tuple(tuple(block) for block in ordered)
