"""Where each of a block's segments is computed, and where its bytes are then: what a step visits, as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from worker.plan.offload import OffloadPlan
from worker.plan.segments import NodeSegment, join

Source = Literal["window", "kept", "ring"]
"""The host's window; the memory of its device, where it stays; the ring in an accelerator's memory."""


@dataclass(frozen=True)
class Place:
    """One segment of a block, the device that computes it, and where its bytes come from."""

    segment: NodeSegment
    source: Source
    number: int  # among the window's segments, those that are kept, or those that pass through the ring


Visits = tuple[tuple[Place, ...], ...]
"""For each block in order of use, its segments in the order in which they are started: accelerators before the host."""


@dataclass(frozen=True)
class Fed:
    """A segment that passes through the ring: `nbytes` bytes of the window's segment `number`, from `begin` on."""

    number: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class Places:
    """What a node's steps visit. `short` ones compute on the host what does not stay on an accelerator."""

    long: Visits
    short: Visits
    kept: tuple[NodeSegment, ...] = ()  # each stays in the memory of its device
    fed: tuple[Fed, ...] = ()  # what passes through the ring, in order of use


def on_the_host(segments: Sequence[NodeSegment]) -> Places:
    """Every segment is the window's."""
    visits = _by_block(Place(segment, "window", number) for number, segment in enumerate(segments))
    return Places(visits, visits)


def staying(segments: Sequence[NodeSegment]) -> Places:
    """Every segment stays in the memory of its device."""
    visits = _by_block(Place(segment, "kept", number) for number, segment in enumerate(segments))
    return Places(visits, visits, tuple(segments))


def through_accelerator(offload: OffloadPlan, window: Sequence[NodeSegment], numbers: Sequence[int]) -> Places:
    """What stays there, what passes through it, and, for short steps, what the host computes.

    The window has the segments `window`; the n-th piece that is fed is (part of) its number `numbers[n]`.
    """
    kept, part_of = join(offload.pieces, offload.kept)
    places = [
        Place(kept[number], "kept", 0) for number in dict.fromkeys(part_of[piece] for piece in sorted(offload.kept))
    ]
    stay = [replace(place, number=number) for number, place in enumerate(places)]
    fed = [
        _fed(offload.pieces[piece], window[number], number) for piece, number in zip(offload.fed, numbers, strict=True)
    ]
    ring = [Place(offload.pieces[piece], "ring", number) for number, piece in enumerate(offload.fed)]
    here = {number: Place(window[number], "window", number) for number in numbers}
    short = [
        here[number] if offload.here(piece) else place
        for place, piece, number in zip(ring, offload.fed, numbers, strict=True)
    ]
    return Places(
        long=_by_block([*stay, *ring]),
        short=_by_block([*stay, *dict.fromkeys(short)]),
        kept=tuple(place.segment for place in stay),
        fed=tuple(fed),
    )


def _fed(piece: NodeSegment, whole: NodeSegment, number: int) -> Fed:
    before = piece.runs[0].units.first - whole.runs[0].units.first
    return Fed(number, before * piece.runs[0].layout.unit_bytes, piece.nbytes)


def _by_block(places: Iterable[Place]) -> Visits:
    """Of each block, those on accelerators first, so that the host computes beside them."""
    blocks: dict[int, list[Place]] = {}
    for place in places:
        blocks.setdefault(place.segment.block.number, []).append(place)
    ordered = (sorted(blocks[number], key=lambda place: place.segment.device == 0) for number in sorted(blocks))
    return tuple(tuple(block) for block in ordered)
