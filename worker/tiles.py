"""Feed-forward blocks that are streamed come in tiles: runs of units that are loaded, kept and computed on their own.

A ring holds at least two neighbours, and an FFN block is three to five times the attention block beside it. In tiles of
about the attention's size the ring takes that much less, which stays in memory instead, and what is streamed is spread
more evenly over the token. The paper's window (`--window`) counts whole blocks, and a node that keeps everything has
nothing to gain.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from scheduler.extent import Extent
from scheduler.memory import PAGE, round_up
from scheduler.tables import tile_starts
from tpi.messages import Assign
from tpi.partition import Range
from worker.assigned import block_bytes, layouts, local_shard, used_blocks
from worker.image import HeldBlock

_LEAST = 8 << 20  # bytes of a tile: less takes a disk no longer than to begin


def ffn_tiles(assign: Assign) -> list[list[Range]]:
    """The units of each tile, layer by layer; one tile where there is nothing to gain."""
    whole = bool(assign.options.window) or assign.options.scheduler == "resident"
    return [_whole(assign, layer) if whole else _cut(assign, layer) for layer in range(len(assign.layers))]


def tile_size(attention: int) -> int:
    """About how many bytes a tile should have, next to an attention block of so many."""
    return max(attention, _LEAST)


def whole_blocks(assign: Assign) -> list[list[Range]]:
    """One tile per layer."""
    return [_whole(assign, layer) for layer in range(len(assign.layers))]


def joined(tiles: Sequence[Sequence[Range]], resident: Collection[int]) -> tuple[list[list[Range]], list[int]]:
    """Neighbouring tiles that stay made one, since one call computes them faster than several.

    Returns the tiles layer by layer, and for each block and tile there was (`resident` are some of them, by number in
    order of use) the number of what it is now, or is part of.
    """
    found: list[list[Range]] = []
    numbers: list[int] = []
    new = 0
    for layer in tiles:
        numbers.append(new)  # the attention block
        found.append([])
        before = False
        for tile in layer:
            stays = len(numbers) in resident
            if before and stays:
                found[-1][-1] = Range(found[-1][-1].first, tile.last)
            else:
                found[-1].append(tile)
                new += 1
            numbers.append(new)
            before = stays
        new += 1
    return found, numbers


def tile_bytes(assign: Assign) -> list[int]:
    """Bytes of memory of each block or tile in order of use, at most: they may begin and end anywhere in a page."""
    sizes: list[int] = []
    for plan, tiles in zip(assign.layers, ffn_tiles(assign), strict=True):
        unit = layouts(assign, plan.ffn)["neuron"].unit_bytes
        alone = assign.rank > 0  # in a shard image, whose units start on a page
        sizes.append(_in_memory(block_bytes(assign, plan.attention), alone))
        sizes += [_in_memory(len(tile) * unit, alone and len(tiles) == 1) for tile in tiles]
    return sizes


def extents_of(assign: Assign, held: Sequence[HeldBlock], tiles: Sequence[Sequence[Range]]) -> list[Extent]:
    """Where each block or tile is on disk, in order of use; `held` are `assign.blocks`."""
    found = []
    for layer, plan in enumerate(assign.layers):
        whole, first = held[plan.ffn].extent, local_shard(assign, layer).ffn.first
        unit = layouts(assign, plan.ffn)["neuron"].unit_bytes
        found.append(held[plan.attention].extent)
        found += [Extent(whole.path, whole.offset + (t.first - first) * unit, len(t) * unit) for t in tiles[layer]]
    return found


def _whole(assign: Assign, layer: int) -> list[Range]:
    return [local_shard(assign, layer).ffn]


def _cut(assign: Assign, layer: int) -> list[Range]:
    units, attention, ffn = local_shard(assign, layer).ffn, *used_blocks(assign)[2 * layer : 2 * layer + 2]
    size = block_bytes(assign, ffn)
    count = max(1, round(size / tile_size(block_bytes(assign, attention))))
    run = replace(layouts(assign, ffn)["neuron"], units=len(units))
    starts = tile_starts(run, -(-len(units) // count) * run.unit_bytes) or [0]
    ends = [*starts[1:], len(units)]
    return [Range(units.first + first, units.first + last) for first, last in zip(starts, ends, strict=True)]


def _in_memory(size: int, aligned: bool) -> int:
    return round_up(size + (0 if aligned else PAGE)) if size else 0
