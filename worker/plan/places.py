"""The segments that a step computes, block by block, each with its device and the place of its weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from worker.plan.offload import OffloadPlan
from worker.plan.segments import NodeSegment, join

Visits = tuple[tuple[NodeSegment, ...], ...]
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
    visits = _by_block(replace(segment, number=number) for number, segment in enumerate(segments))
    return Places(visits, visits)


def through_accelerator(offload: OffloadPlan, window: Sequence[NodeSegment], numbers: Sequence[int]) -> Places:
    """Return the places of a node with accelerators: resident, streamed, or computed by the host.

    Args:
        offload: which pieces are resident, and which are streamed in long and in short steps.
        window: the segments of the host's window.
        numbers: for each piece of `offload.host_pieces`, the index in `window` of the segment that contains it.
    """
    kept, part_of = join(offload.pieces, offload.resident)
    chosen = [kept[number] for number in dict.fromkeys(part_of[piece] for piece in sorted(offload.resident))]
    stay = [replace(segment, memory="kept", number=number) for number, segment in enumerate(chosen)]
    within = dict(zip(offload.host_pieces, numbers, strict=True))
    ring = {piece: replace(offload.pieces[piece], memory="ring", number=piece) for piece in offload.streamed_pieces}

    def visits(streamed: frozenset[int]) -> Visits:
        hosted = dict.fromkeys(number for piece, number in within.items() if piece not in streamed)
        from_window = (replace(window[number], number=number) for number in hosted)
        found = _by_block([*stay, *(ring[piece] for piece in sorted(streamed)), *from_window])
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
    return StreamedRange(number, whole.offset_of(piece), piece.nbytes)


def _gathered(block: tuple[NodeSegment, ...]) -> tuple[NodeSegment, ...]:
    """Return a block of experts as one segment whose parts lie in several places; return any other block unchanged.

    One kernel call then computes all experts, wherever they lie.
    """
    first = block[0]
    if first.block.kind != "experts" or len(block) == 1:
        return block
    runs = tuple(run for segment in block for run in segment.runs)
    return (replace(first, runs=runs, memory="parts", number=-1, parts=block),)


def _by_block(segments: Iterable[NodeSegment]) -> Visits:
    """Return `segments` by block, accelerators first, so that the host computes while accelerators do."""
    blocks: dict[int, list[NodeSegment]] = {}
    for segment in segments:
        blocks.setdefault(segment.block.number, []).append(segment)
    ordered = (sorted(blocks[number], key=lambda segment: segment.device == 0) for number in sorted(blocks))
    return tuple(tuple(block) for block in ordered)
