"""The choice of resident and streamed blocks for a given number of bytes of memory.

Blocks are used in a cycle, so evicting the least recently used block would miss every time. Instead a fixed set stays
resident (the paper's block retention, for any budget). The set is spread evenly over the cycle, so that the loader has
equal time for each streamed block. The set is as large as the budget allows in addition to the ring. The exact timeline
at the node's speeds decides how many large and small blocks are resident and how large the ring is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

from scheduler.model.ring import EMPTY, Ring, layouts, neighbours, smallest
from scheduler.model.timeline import Costs, simulate
from tpi.devices.pages import PAGE
from tpi.errors import PlanError
from tpi.pack.layout import BlockKind

PAPERS_LAYER: tuple[BlockKind, ...] = ("attention", "ffn")  # TPI-LLM's layer: the default kinds of blocks
_DEPTHS = (1, 2, 3, 4)  # blocks in a ring: three suffice in theory (scheduler.model.steady), four with slow reads
_MOST_CHOICES = 24  # at most so many numbers of resident large blocks are compared
_TOKENS = 4  # tokens simulated per choice
_AS_GOOD = 1.03  # of choices within this factor of the best time (the timeline's error), the deepest ring is taken


@dataclass(frozen=True)
class Speeds:
    """Speeds for which a placement is chosen; the defaults are a laptop's. Only their ratios matter.

    A larger `turn` or `start` favours a ring of several blocks over a ring of one. With one block, every load finds the
    disk idle, and nothing is loaded between two tokens, because the ring is full by then.
    """

    disk: float = 1e9  # bytes per second
    compute: float = 15e9  # bytes of weights per second
    exchange: float = 0.0  # seconds per allreduce
    turn: float = 0.0  # seconds from the last block of a token to the first of the next, without the allreduce
    start: float = 0.0  # additional seconds of a load if the disk was idle before it

    def costs(self, sizes: Sequence[int]) -> Costs:
        """Return the seconds to compute, exchange and load each of the blocks, which have `sizes` bytes."""
        exchange = [self.exchange] * (len(sizes) - 1) + [self.exchange + self.turn]
        return Costs([s / self.compute for s in sizes], exchange, [s / self.disk for s in sizes], start=self.start)


@dataclass(frozen=True)
class Placement:
    """The resident blocks, and the ring that the others are streamed through. Sizes are in bytes of memory."""

    sizes: tuple[int, ...]
    resident: frozenset[int]
    ring: Ring

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident blocks."""
        return _sum(self.resident, self.sizes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the resident blocks and the ring."""
        return self.resident_bytes + self.ring.size

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from disk per token."""
        return sum(self.sizes) - self.resident_bytes

    def renumbered(self, numbers: Sequence[int], sizes: Sequence[int]) -> "Placement":
        """Return the same placement with the numbers that blocks have after resident neighbours were joined.

        Block b becomes block `numbers[b]`, and `sizes` are the sizes of the new blocks.
        """
        ring = replace(self.ring, blocks=tuple(numbers[block] for block in self.ring.blocks))
        return Placement(tuple(sizes), frozenset(numbers[block] for block in self.resident), ring)


def place(sizes: Sequence[int], budget: int, speeds: Speeds | None = None) -> Placement:
    """Return the fastest placement of blocks of `sizes` bytes (in order of use) in at most `budget` bytes.

    Raises:
        PlanError: if not even the largest block fits.
    """
    everything = frozenset(range(len(sizes)))
    if sum(sizes) <= budget:
        return Placement(tuple(sizes), everything, EMPTY)
    if max(sizes) > budget:
        raise PlanError(f"{budget} bytes for weights cannot hold the largest block; {max(sizes)} bytes would do")
    costs = (speeds or Speeds()).costs(sizes)
    timed = [(simulate(choice.ring, costs, _TOKENS).steady_token, choice) for choice in _choices(sizes, budget)]
    enough = _AS_GOOD * min(seconds for seconds, _ in timed)
    good = [choice for seconds, choice in timed if seconds <= enough]
    return min(
        good, key=lambda choice: (-min(choice.ring.depth, max(_DEPTHS)), choice.streamed_bytes, choice.ring.size)
    )


def place_window(
    sizes: Sequence[int], window: int, retain: int = 0, kinds: Sequence[BlockKind] | None = None
) -> Placement:
    """Return the paper's placement: `window` blocks in memory, and every `retain`-th FFN block resident (0: none).

    `kinds` are the kinds of the blocks, in order of use. If the window spans all streamed blocks, all blocks are
    resident.
    """
    ffn = [block for block, kind in enumerate(kinds_of(len(sizes), kinds)) if kind == "ffn"]
    kept = set(ffn[retain - 1 :: retain] if retain else ())
    kept.update(block for block, size in enumerate(sizes) if not size)
    streamed = [block for block in range(len(sizes)) if block not in kept]
    if window >= len(streamed):
        return Placement(tuple(sizes), frozenset(range(len(sizes))), EMPTY)
    return Placement(tuple(sizes), frozenset(kept), smallest(streamed, sizes, max(1, window)))


def kinds_of(blocks: int, kinds: Sequence[BlockKind] | None) -> tuple[BlockKind, ...]:
    """Return the kind of each block, in order of use: `kinds`, or attention and FFN in turn if it is None."""
    found = tuple(islice(cycle(PAPERS_LAYER), blocks) if kinds is None else kinds)
    assert len(found) == blocks, f"{blocks} blocks, but {len(found)} kinds"
    return found


def _choices(sizes: Sequence[int], budget: int) -> Iterator[Placement]:
    """Yield the placements to compare.

    Each has one of several ring sizes, one of several numbers of resident large blocks, and as many resident small
    blocks as still fit. Each is yielded once for every layout of its ring.
    """
    large, small = _two_kinds(sizes)
    empty = {block for block, size in enumerate(sizes) if not size}
    pairs = [most * max(sizes[block] for block in kind) for kind in (large, small) if kind for most in (1, 2)]
    rings = {*pairs, *(neighbours(sizes, depth) for depth in _DEPTHS), min(budget, neighbours(sizes, 2))}
    step = -(-len(large) // _MOST_CHOICES)
    for size in sorted(size // PAGE * PAGE for size in rings if size <= budget):
        for count in sorted({*range(0, len(large) + 1, step), len(large)}):
            kept = empty | set(spread(large, count))
            room = budget - size - _sum(kept, sizes)
            if room >= 0:
                kept.update(_evenly_spaced(small, sizes, room))
                kept.update(_largest_fitting(kept, sizes, budget - size - _sum(kept, sizes)))
                streamed = [block for block in range(len(sizes)) if block not in kept]
                for ring in layouts(streamed, sizes, size):
                    yield Placement(tuple(sizes), frozenset(kept), ring)


def _evenly_spaced(items: Sequence[int], sizes: Sequence[int], room: int) -> list[int]:
    """Return as many of `items`, evenly spaced, as fit into `room` bytes."""
    choices = (spread(items, count) for count in range(len(items), 0, -1))
    return next((chosen for chosen in choices if _sum(chosen, sizes) <= room), [])


def _largest_fitting(kept: set[int], sizes: Sequence[int], room: int) -> list[int]:
    found = []
    for block in sorted(set(range(len(sizes))) - kept, key=lambda block: -sizes[block]):
        if sizes[block] <= room:
            found.append(block)
            room -= sizes[block]
    return found


def _sum(blocks: Iterable[int], sizes: Sequence[int]) -> int:
    return sum(sizes[block] for block in blocks)


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return `count` of `items`, evenly spaced."""
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]


def _two_kinds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the large and the small blocks, which lie above and below the widest gap between sizes.

    If all sizes are equal, all blocks are large. Empty blocks are in neither list.
    """
    ordered = sorted(set(sizes) - {0})
    gaps = [(high / low, high) for low, high in pairwise(ordered)]
    bar = max(gaps)[1] if gaps else 0
    return [b for b, s in enumerate(sizes) if s >= max(bar, 1)], [b for b, s in enumerate(sizes) if 0 < s < bar]
