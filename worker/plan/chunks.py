"""The division of a layer's weights for batches into resident pieces and streamed chunks.

After MoE-Lightning's weights paging (appendix A.1), a layer is streamed in as many chunks as there are micro-batches.
Chunks are cut between units, even inside an expert. The streamed part of attention or of dense neurons is one piece,
since its kernel needs it in one place. It is only copied in parts of a chunk's size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpi.partition import Range
from worker.node_plan import NodeBlock, NodeLayer, NodePlan, RunUnits
from worker.plan.offload import Numbers
from worker.plan.segments import NodeSegment

Runs = tuple[RunUnits, ...]
_LEAST = 1 << 16  # bytes of a chunk: a smaller copy takes hardly less time on the link


@dataclass(frozen=True)
class Chunking:
    """The division of a layer into `count` chunks, or fewer if chunks would be smaller than `least` bytes."""

    count: int
    least: int = _LEAST

    def size(self, passing: int) -> int:
        """Return the size in bytes of each chunk of a layer that streams `passing` bytes."""
        return max(self.least, -(-passing // self.count))


def pieces_of(plan: NodePlan, kept: float, chunking: Chunking) -> tuple[tuple[NodeSegment, ...], Numbers]:
    """Cut the node's blocks; return all pieces in order of use, and the numbers of the resident pieces.

    Args:
        plan: the node's part of the deployment.
        kept: the share of each layer's bytes that is resident, from 0 to 1.
        chunking: the chunks of each layer's other bytes.
    """
    found: list[NodeSegment] = []
    stay: set[int] = set()
    for layer in plan.layers:
        for piece, stays in _layer(layer, kept * sum(block.nbytes for block in layer.blocks), chunking):
            if stays:
                stay.add(len(found))
            found.append(replace(piece, device=1))
    return tuple(found), frozenset(stay)


def _layer(layer: NodeLayer, room: float, chunking: Chunking) -> Iterator[tuple[NodeSegment, bool]]:
    """Yield the pieces of a layer, each with True if it is resident.

    Resident pieces have at most `room` bytes in all.
    """
    cut: list[tuple[NodeBlock, Runs, Runs]] = []
    for block in layer.blocks:
        first, rest = _cut(block, room)
        room -= sum(run.nbytes for run in first)
        cut.append((block, first, rest))
    size = chunking.size(sum(run.nbytes for _, _, rest in cut for run in rest))
    for block, first, rest in cut:
        if first:
            yield NodeSegment(block, first), True
        for runs in in_chunks(rest, size) if block.kind == "experts" else (rest,):
            if runs:
                yield NodeSegment(block, runs), False


def _cut(block: NodeBlock, room: float) -> tuple[Runs, Runs]:
    """Divide a block into the units that fit into `room` bytes, and the others. Attention blocks are not divided."""
    if block.nbytes <= room + 1:
        return block.runs, ()
    if block.kind == "experts":
        return divide_experts(block, room)
    if block.half == "attention":
        return (), block.runs
    (run,) = block.runs
    count = max(0, int(room // run.layout.unit_bytes))
    return _between(block.runs, 0, count), _between(block.runs, count, len(run.units))


def divide_experts(block: NodeBlock, room: float) -> tuple[Runs, Runs]:
    """Divide a block of experts into the units that fit into `room` bytes, and the others, which are contiguous.

    The first units are resident. If the shared experts, which come first and are never cut, do not fit, the last units
    are resident instead.
    """
    shared, routed = _sorted(block.runs)
    shared_bytes = sum(run.nbytes for run in shared)
    units, each = sum(len(run.units) for run in routed), routed[0].layout.unit_bytes
    fits = shared_bytes <= room
    count = min(units, max(0, int((room - shared_bytes * fits) // each)))
    if fits:
        return (*shared, *_between(routed, 0, count)), _between(routed, count, units)
    return _between(routed, units - count, units), (*shared, *_between(routed, 0, units - count))


def in_chunks(runs: Sequence[RunUnits], size: int) -> Iterator[Runs]:
    """Cut units of experts into even chunks of about `size` bytes. Shared experts are a chunk by themselves."""
    shared, routed = _sorted(runs)
    if shared:
        yield shared
    units = sum(len(run.units) for run in routed)
    count = min(units, max(1, round(sum(run.nbytes for run in routed) / size)))
    for first, last in pairwise(units * at // max(1, count) for at in range(count + 1)):
        yield _between(routed, first, last)


def _sorted(runs: Sequence[RunUnits]) -> tuple[Runs, Runs]:
    shared = tuple(run for run in runs if run.name == "shared" and len(run.units))
    return shared, tuple(run for run in runs if run.name == "neuron")


def _between(runs: Sequence[RunUnits], first: int, last: int) -> Runs:
    """Return the units `first` to `last` (exclusive), counted from 0 over all of `runs`, as runs."""
    found, begin = list[RunUnits](), 0
    for run in runs:
        end = begin + len(run.units)
        if max(first, begin) < min(last, end):
            at = run.units.first - begin
            found.append(run.cut(Range(at + max(first, begin), at + min(last, end))))
        begin = end
    return tuple(found)
