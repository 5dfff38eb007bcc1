"""Where each of a block's segments is computed, and where its bytes are then: what a step visits, as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from worker.plan.segments import NodeSegment, join

if TYPE_CHECKING:
    from worker.plan.offload import OffloadPlan

Source = Literal["window", "kept", "ring", "parts"]
"""The host's window; the memory of its device, where it stays; the ring in an accelerator's memory; several of them."""


@dataclass(frozen=True)
class Place:
    """One segment of a block, the device that computes it, and where its bytes come from.

    If those lie apart, `parts` are where: its runs are theirs, one after the other.
    """

    segment: NodeSegment
    source: Source
    number: int  # among the window's segments, those that are kept, all pieces, or blocks
    parts: "tuple[Place, ...]" = ()


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


def through_accelerator(offload: "OffloadPlan", window: Sequence[NodeSegment], numbers: Sequence[int]) -> Places:
    """What stays there, and for long and short steps what passes through it and what the host computes.

    The window has the segments `window`; the n-th piece that is fed is (part of) its number `numbers[n]`.
    """
    kept, part_of = join(offload.pieces, offload.kept)
    chosen = [kept[number] for number in dict.fromkeys(part_of[piece] for piece in sorted(offload.kept))]
    stay = [Place(segment, "kept", number) for number, segment in enumerate(chosen)]
    within = dict(zip(offload.fed, numbers, strict=True))
    ring = {piece: Place(offload.pieces[piece], "ring", piece) for piece in offload.lifted}

    def visits(there: frozenset[int]) -> Visits:
        here = (Place(window[number], "window", number) for piece, number in within.items() if piece not in there)
        found = _by_block([*stay, *(ring[piece] for piece in sorted(there)), *dict.fromkeys(here)])
        return tuple(_gathered(block) for block in found) if offload.gathers else found

    return Places(
        long=visits(offload.long),
        short=visits(offload.short),
        kept=tuple(chosen),
        fed=tuple(_fed(offload.pieces[piece], window[within[piece]], within[piece]) for piece in offload.lifted),
    )


def _fed(piece: NodeSegment, whole: NodeSegment, number: int) -> Fed:
    return Fed(number, whole.before(piece), piece.nbytes)


def _gathered(block: tuple[Place, ...]) -> tuple[Place, ...]:
    """Experts that lie in several places as one segment: a kernel finds each wherever it is."""
    first = block[0].segment
    if first.block.kind != "experts" or len(block) == 1:
        return block
    runs = tuple(run for place in block for run in place.segment.runs)
    return (Place(replace(first, runs=runs), "parts", first.block.number, block),)


def _by_block(places: Iterable[Place]) -> Visits:
    """Of each block, those on accelerators first, so that the host computes beside them."""
    blocks: dict[int, list[Place]] = {}
    for place in places:
        blocks.setdefault(place.segment.block.number, []).append(place)
    ordered = (sorted(blocks[number], key=lambda place: place.segment.device == 0) for number in sorted(blocks))
    return tuple(tuple(block) for block in ordered)
