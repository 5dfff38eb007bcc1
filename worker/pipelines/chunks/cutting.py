"""How a layer's weights are cut for batches: what stays of each block, and in which chunks the rest passes through.

MoE-Lightning's weights paging (appendix A.1): a layer passes in as many chunks as there are micro-batches. Chunks are
cut at units, wherever experts begin and end. What passes of attention or of dense neurons is one piece, since their
kernels take it as it lies in one place; only its copies go by the size of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tpi.partition import Range
from worker.plan.node_plan import NodeBlock, NodeLayer, NodePlan, RunUnits
from worker.plan.offload import Numbers
from worker.plan.segments import NodeSegment

Runs = tuple[RunUnits, ...]
_LEAST = 1 << 16  # bytes of a chunk: less takes the link no longer than to begin


@dataclass(frozen=True)
class Chunking:
    """A layer in `count` chunks, or in fewer of `least` bytes each."""

    count: int
    least: int = _LEAST

    def size(self, passing: int) -> int:
        """Bytes of a chunk where so many pass through of a layer."""
        return max(self.least, -(-passing // self.count))


def pieces_of(plan: NodePlan, kept: float, chunking: Chunking) -> tuple[tuple[NodeSegment, ...], Numbers]:
    """All pieces in order of use, and the numbers of those that stay."""
    found: list[NodeSegment] = []
    stay: set[int] = set()
    for layer in plan.layers:
        for piece, stays in _layer(layer, kept * sum(block.nbytes for block in layer.blocks), chunking):
            if stays:
                stay.add(len(found))
            found.append(replace(piece, device=1))
    return tuple(found), frozenset(stay)


def _layer(layer: NodeLayer, room: float, chunking: Chunking) -> Iterator[tuple[NodeSegment, bool]]:
    """Each block as what stays and what passes through, with whether it stays."""
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
    """A block's units that fit into `room` bytes, from the first on, and the others; some blocks are one piece."""
    if block.nbytes <= room + 1:
        return block.runs, ()
    if block.kind == "experts":
        return kept_experts(block, room)
    if block.kind == "attention" or len(block.runs) > 1:
        return (), block.runs
    (run,) = block.runs
    count = max(0, int(room // run.layout.unit_bytes))
    return _between(block.runs, 0, count), _between(block.runs, count, len(run.units))


def kept_experts(block: NodeBlock, room: float) -> tuple[Runs, Runs]:
    """What of a block of experts fits into `room` bytes, and the rest, which is contiguous.

    Units are kept from the first on; or, where shared experts do not fit, which are never cut, the last ones.
    """
    shared, routed = _sorted(block.runs)
    beside = sum(run.nbytes for run in shared)
    units, each = sum(len(run.units) for run in routed), routed[0].layout.unit_bytes
    fits = beside <= room
    count = min(units, max(0, int((room - beside * fits) // each)))
    if fits:
        return (*shared, *_between(routed, 0, count)), _between(routed, count, units)
    return _between(routed, units - count, units), (*shared, *_between(routed, 0, units - count))


def in_chunks(runs: Sequence[RunUnits], size: int) -> Iterator[Runs]:
    """Units of experts that pass through, in even chunks of about `size` bytes; shared experts by themselves."""
    shared, routed = _sorted(runs)
    if shared:
        yield shared
    units = sum(len(run.units) for run in routed)
    count = min(units, max(1, round(sum(run.nbytes for run in routed) / size)))
    for first, last in pairwise(units * at // max(1, count) for at in range(count + 1)):
        yield _between(routed, first, last)


def _sorted(runs: Sequence[RunUnits]) -> tuple[Runs, Runs]:
    """Units of shared experts, if there are any, and of routed ones."""
    shared = tuple(run for run in runs if run.name == "shared" and len(run.units))
    return shared, tuple(run for run in runs if run.name == "neuron")


def _between(runs: Sequence[RunUnits], first: int, last: int) -> Runs:
    """The units number `first` to `last` of runs that lie back to back."""
    found, begin = list[RunUnits](), 0
    for run in runs:
        end = begin + len(run.units)
        if max(first, begin) < min(last, end):
            at = run.units.first - begin
            found.append(run.cut(Range(at + max(first, begin), at + min(last, end))))
        begin = end
    return tuple(found)
