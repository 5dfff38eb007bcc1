"""Which pieces of a block are loaded, kept and computed as one: its *segments*.

A ring holds at least two neighbours, and an FFN block is three to five times the attention block beside it. In tiles of
about the attention's size the ring takes that much less, which stays in memory instead, and what is streamed is spread
more evenly over the token. The paper's window (`--window`) counts whole blocks, and a node that keeps everything has
nothing to gain.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from scheduler.storage.extent import Extent, tile_starts
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.partition import Range, deal, kv_range
from worker.plan.node_plan import NodeBlock, NodePlan, RunUnits
from worker.shards.image import HeldBlock

_LEAST = 8 << 20  # bytes of a tile: less takes a disk no longer than to begin
_ASIDE = ("latent", "kv")  # runs of which a device has what its query heads need


@dataclass(frozen=True)
class NodeSegment:
    """Units of one block that are loaded, kept and computed together. The partial results of a block's segments add."""

    block: NodeBlock
    runs: tuple[RunUnits, ...]
    device: int = 0  # which of the node's computes it; 0 is the host

    @property
    def nbytes(self) -> int:
        """Bytes of its units, back to back."""
        return sum(run.nbytes for run in self.runs)

    @property
    def whole(self) -> bool:
        """Whether it is all that this node has of its block."""
        return self.runs == self.block.runs

    def extent(self, held: Sequence[HeldBlock]) -> Extent:
        """Where it is on disk, if in one piece; `held` are the plan's blocks by their source."""
        found = held[self.block.source].extent
        return Extent(found.path, found.offset + self._offset, self.nbytes)

    def before(self, piece: "NodeSegment") -> int:
        """Bytes of this segment before those of `piece`, which is a part of it in one piece."""
        return piece._offset - self._offset

    @property
    def neurons_before(self) -> int:
        """How many of the node's neurons of this feed-forward block come before its own."""
        own, run = self.block.runs[0], self.runs[0]
        return (run.units.first - own.units.first) * run.layout.width

    @property
    def _offset(self) -> int:
        """Bytes of the block's units before its own."""
        return 0 if self.whole else _begin(self.block, self.runs[0])

    def pieces(self, held: Sequence[HeldBlock]) -> list[Extent]:
        """Where each of its runs is on disk."""
        found = held[self.block.source].extent
        return [Extent(found.path, found.offset + _begin(self.block, run), run.nbytes) for run in self.runs]

    def most_bytes(self, rank: int) -> int:
        """Bytes of memory that it takes at most: but for a shard image's, they lie anywhere in a page."""
        starts_on_a_page = rank > 0 and self.whole
        return round_up(self.nbytes + (0 if starts_on_a_page else PAGE)) if self.nbytes else 0


def whole_blocks(plan: NodePlan) -> list[NodeSegment]:
    """One segment per block, in order of use."""
    return [NodeSegment(block, block.runs) for block in plan.blocks]


def on_devices(plan: NodePlan, shares: Sequence[float]) -> list[NodeSegment]:
    """Every block dealt over the node's devices, the host first: the others' segments come first, so as to start first.

    A KV head whose query heads are on both sides of a cut is kept on both.
    """
    if plan.config.whole_norms:
        raise PlanError(
            "this model norms its queries and keys over all heads, which two devices of one node do not share; use one"
        )
    segments: list[NodeSegment] = []
    for block in plan.blocks:
        dealt = [deal(len(run.units), shares) for run in block.runs if run.name not in _ASIDE]
        of_run = dealt if block.kind == "experts" else [dealt[0]] * len(block.runs)
        parts = [
            NodeSegment(
                block,
                tuple(_part(plan, block, run, mine[number]) for run, mine in zip(block.runs, of_run, strict=True)),
                number,
            )
            for number in range(len(shares))
        ]
        segments += [*parts[1:], parts[0]]
    return segments


def tiles(plan: NodePlan) -> list[NodeSegment]:
    """The segments to stream by, in order of use: large blocks of one run in tiles, if there is anything to gain."""
    return whole_blocks(plan) if plan.options.scheduler == "resident" else cut_pieces(plan)


def cut_pieces(plan: NodePlan) -> list[NodeSegment]:
    """Large blocks of one run in tiles; whole blocks where the paper's window counts them."""
    if plan.options.window:
        return whole_blocks(plan)
    return [segment for layer in plan.layers for segment in _tiled(layer.blocks)]


def tile_size(smallest: int) -> int:
    """About how many bytes a tile should have, in a layer whose smallest block has so many."""
    return max(smallest, _LEAST)


def join(segments: Sequence[NodeSegment], resident: Collection[int]) -> tuple[list[NodeSegment], list[int]]:
    """Neighbours of one block that stay made one, since one call computes them faster than several.

    Returns the segments there are now and, for each there was (`resident` are some of them, by number), the number of
    what it is now, or is part of.
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


def per_block(segments: Sequence[NodeSegment]) -> list[range]:
    """The numbers of each block's segments, block by block."""
    counts: dict[int, int] = {}
    for segment in segments:
        counts[segment.block.number] = counts.get(segment.block.number, 0) + 1
    ends = [sum(list(counts.values())[: at + 1]) for at in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts.values(), strict=True)]


def _tiled(blocks: Sequence[NodeBlock]) -> Iterator[NodeSegment]:
    smallest = min((block.nbytes for block in blocks), default=0)
    for block in blocks:
        if block.kind == "experts":
            yield from (NodeSegment(block, tuple(runs)) for runs in _tiled_experts(block, tile_size(smallest)))
        elif len(block.runs) == 1:
            parts = cut_units(block, tile_size(smallest))
            yield from (NodeSegment(block, (block.runs[0].cut(part),)) for part in parts)
        else:
            yield NodeSegment(block, block.runs)


def _tiled_experts(block: NodeBlock, size: int) -> list[list[RunUnits]]:
    """Neighbouring experts, or slices of experts, of about `size` bytes together: each range of units whole, unless it
    is larger than that alone."""
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
    """The units of a block of one run in tiles of about `size` bytes."""
    (run,) = block.runs
    count = max(1, round(block.nbytes / size))
    held = replace(run.layout, units=len(run.units))
    starts = tile_starts(held, -(-len(run.units) // count) * held.unit_bytes) or [0]
    ends = [*starts[1:], len(run.units)]
    first = run.units.first
    return [Range(first + begin, first + end) for begin, end in zip(starts, ends, strict=True)]


def _part(plan: NodePlan, block: NodeBlock, run: RunUnits, dealt: Range) -> RunUnits:
    """The units of a run that belong to `dealt` of the node's units of its block."""
    if run.name == "latent":  # every head needs all of it
        return run if len(dealt) else run.cut(Range(0, 0))
    if run.name != "kv":
        return run.cut(Range(run.units.first + dealt.first, run.units.first + dealt.last))
    config, query = plan.config, _part(plan, block, block.run("query"), dealt)
    query_heads, kv_heads = query.layout.width // config.head_dim, run.layout.width // config.kv_width
    return run.cut(kv_range(query.units, query_heads, kv_heads, config.heads, config.kv_heads))


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
    """The range of the block's units that `part` was cut from."""
    return next(
        run
        for run in block.runs
        if run.layout == part.layout and run.units.first <= part.units.first and part.units.last <= run.units.last
    )


def _begin(block: NodeBlock, part: RunUnits) -> int:
    """Bytes of the block's units before `part`; 0 if that is empty."""
    if not part.nbytes:
        return 0
    source = _source(block, part)
    return sum(run.nbytes for run in block.runs[: block.runs.index(source)]) + source.nbytes_before(part)
