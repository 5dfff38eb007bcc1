"""The division of blocks into *segments*: parts of a block that are loaded, held and computed together.

A ring holds at least two neighbouring segments, and an FFN block is three to five times as large as an attention block.
So FFN blocks are cut into tiles of about the size of an attention block. The ring is then smaller, which leaves memory
for more resident weights, and reads are spread more evenly over a token. Blocks are not cut for the paper's window
(`--window`), which counts whole blocks, nor on a node that holds all its weights in memory.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from scheduler.storage.extent import Extent, tile_starts
from tpi.devices.pages import PAGE, round_up
from tpi.partition import Range
from worker.node_plan import NodeBlock, NodePlan, RunUnits
from worker.shards.image import HeldBlock

Memory = Literal["window", "kept", "ring", "parts"]
"""Where a segment's weights lie when it is computed.

"window": in the host's window. "kept": resident in its device's memory. "ring": in an accelerator's ring. "parts": in
several of these places.
"""

_LEAST = 8 << 20  # bytes of a tile: a disk spends most of a smaller read on starting it


@dataclass(frozen=True)
class NodeSegment:
    """Units of one block that are loaded, held and computed together.

    The sum of the partial results of a block's segments is the node's partial result for the block.

    Attributes:
        block: the block.
        runs: the units.
        device: the number of the node's device that computes it; 0 is the host.
        memory: where its weights lie during a step; set by `worker.plan.places`.
        number: depending on `memory`, the index into the window's segments, the resident segments, or the pieces of
            the ring; -1 for other values of `memory`, and before the segment is placed.
        parts: if `memory` is "parts", the segments that its runs come from, one after the other.
    """

    block: NodeBlock
    runs: tuple[RunUnits, ...]
    device: int = 0
    memory: Memory = "window"
    number: int = -1
    parts: "tuple[NodeSegment, ...]" = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the segment's units, back to back."""
        return sum(run.nbytes for run in self.runs)

    @property
    def whole(self) -> bool:
        """True if the segment has all units that this node holds of its block."""
        return self.runs == self.block.runs

    def extent(self, held: Sequence[HeldBlock]) -> Extent:
        """Return the byte range on disk of a segment whose runs are adjacent there.

        Args:
            held: the files of the plan's blocks, by `NodeBlock.source`.
        """
        found = held[self.block.source].extent
        return Extent(found.path, found.offset + self._offset, self.nbytes)

    def offset_of(self, piece: "NodeSegment") -> int:
        """Return the offset of `piece`, a contiguous part of this segment, in bytes from the segment's start."""
        return piece._offset - self._offset

    @property
    def neurons_before(self) -> int:
        """The number of the node's neurons in this feed-forward block that come before the segment's."""
        own, run = self.block.runs[0], self.runs[0]
        return (run.units.first - own.units.first) * run.layout.width

    @property
    def _offset(self) -> int:
        return 0 if self.whole else _begin(self.block, self.runs[0])

    def pieces(self, held: Sequence[HeldBlock]) -> list[Extent]:
        """Return the byte range of each run on disk.

        Args:
            held: the files of the plan's blocks, by `NodeBlock.source`.
        """
        found = held[self.block.source].extent
        return [Extent(found.path, found.offset + _begin(self.block, run), run.nbytes) for run in self.runs]

    def max_bytes(self, rank: int) -> int:
        """Return the largest number of bytes of memory that the segment takes on the node with rank `rank`.

        A whole block in a worker's shard image starts on a page. Other segments may start anywhere in a page, and so
        may take one page more.
        """
        starts_on_a_page = rank > 0 and self.whole
        return round_up(self.nbytes + (0 if starts_on_a_page else PAGE)) if self.nbytes else 0


def whole_blocks(plan: NodePlan) -> list[NodeSegment]:
    """Return one segment per block, in order of use."""
    return [NodeSegment(block, block.runs) for block in plan.blocks]


def tiles(plan: NodePlan) -> list[NodeSegment]:
    """Return all segments in order of use: those of `cut_pieces`, or whole blocks if the scheduler is off."""
    return whole_blocks(plan) if plan.options.scheduler == "resident" else cut_pieces(plan)


def cut_pieces(plan: NodePlan) -> list[NodeSegment]:
    """Return all segments in order of use. Large blocks of experts, or of one run, are cut into tiles.

    Others stay whole.

    With `--window`, which counts blocks, no block is cut.
    """
    if plan.options.window:
        return whole_blocks(plan)
    return [segment for layer in plan.layers for segment in _tiled(layer.blocks)]


def tile_size(smallest: int) -> int:
    """Return the approximate size of a tile in bytes, in a layer whose smallest block has `smallest` bytes."""
    return max(smallest, _LEAST)


def join(segments: Sequence[NodeSegment], resident: Collection[int]) -> tuple[list[NodeSegment], list[int]]:
    """Join resident neighbours of one block, since one call computes them faster than several.

    Args:
        segments: segments in order of use.
        resident: the indices of the resident segments.

    Returns:
        The joined segments, and for each of `segments` the index of the joined segment that contains it.
    """
    found: list[NodeSegment] = []
    numbers: list[int] = []
    for number, segment in enumerate(segments):
        before = found[-1] if found else None
        together = before and before.block is segment.block and before.device == segment.device
        if before and together and {number - 1, number} <= set(resident):
            found[-1] = _united(before, segment)
        else:
            found.append(segment)
        numbers.append(len(found) - 1)
    return found, numbers


def _tiled(blocks: Sequence[NodeBlock]) -> Iterator[NodeSegment]:
    smallest = min((block.nbytes for block in blocks), default=0)
    for block in blocks:
        if block.kind == "experts":
            yield from (NodeSegment(block, tuple(runs)) for runs in _tiled_experts(block, tile_size(smallest)))
        elif len(block.runs) == 1 and block.kind != "attention":
            parts = cut_units(block, tile_size(smallest))
            yield from (NodeSegment(block, (block.runs[0].cut(part),)) for part in parts)
        else:
            yield NodeSegment(block, block.runs)


def _tiled_experts(block: NodeBlock, size: int) -> list[list[RunUnits]]:
    """Cut a block of experts into tiles of about `size` bytes: several experts, or slices of experts.

    A run's range of units is cut only if the range alone is larger than a tile.
    """
    tiles: list[list[RunUnits]] = []
    room = 0
    for run in block.runs:
        count = max(1, round(run.nbytes / size))
        starts = [run.units.first + len(run.units) * part // count for part in range(count + 1)]
        for part in (run.cut(Range(first, last)) for first, last in pairwise(starts)):
            if not tiles or part.nbytes > room:
                tiles.append([])
                room = size
            tiles[-1].append(part)
            room -= part.nbytes
    return tiles


def cut_units(block: NodeBlock, size: int) -> list[Range]:
    """Cut the units of a block with one run into tiles of about `size` bytes."""
    (run,) = block.runs
    count = max(1, round(block.nbytes / size))
    held = replace(run.layout, units=len(run.units))
    starts = tile_starts(held, -(-len(run.units) // count) * held.unit_bytes) or [0]
    ends = [*starts[1:], len(run.units)]
    first = run.units.first
    return [Range(first + begin, first + end) for begin, end in zip(starts, ends, strict=True)]


def _united(one: NodeSegment, other: NodeSegment) -> NodeSegment:
    runs = [*one.runs]
    for run in other.runs:
        whole = _source(one.block, run)
        if whole is _source(one.block, runs[-1]):
            runs[-1] = whole.cut(Range(runs[-1].units.first, run.units.last))
        else:
            runs.append(run)
    return replace(one, runs=tuple(runs))


def _source(block: NodeBlock, part: RunUnits) -> RunUnits:
    """Return the run of the block from which `part` was cut."""
    return next(
        run
        for run in block.runs
        if run.layout == part.layout and run.units.first <= part.units.first and part.units.last <= run.units.last
    )


def _begin(block: NodeBlock, part: RunUnits) -> int:
    """Return the bytes of the block's units before `part`; 0 if `part` is empty."""
    if not part.nbytes:
        return 0
    source = _source(block, part)
    return sum(run.nbytes for run in block.runs[: block.runs.index(source)]) + source.nbytes_before(part)
