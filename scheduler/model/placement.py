"""Which blocks stay in memory and which are streamed, for a number of bytes.

Blocks are used in a cycle, so evicting the least recently used one would miss every time. A fixed set stays instead
(the paper's block retention, for any budget), spread evenly over the cycle so that the loader has equal time for each
of the others, and as many bytes of it as the budget takes beside the ring. How many large and how many small blocks
stay, and how large the ring is, is decided by the exact timeline at the node's speeds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

from scheduler.model.ring import EMPTY, Ring, layouts, neighbours, smallest
from scheduler.model.timeline import Costs, simulate
from tpi.devices.pages import PAGE
from tpi.errors import PlanError
from tpi.pack.layout import BlockKind

PAPERS_LAYER: tuple[BlockKind, ...] = ("attention", "ffn")  # TPI-LLM's: what blocks are taken for if nobody says
_DEPTHS = (1, 2, 3, 4)  # three suffice in theory (scheduler.model.steady), a fourth takes up the disk's moods
_MOST_CHOICES = 24  # numbers of large blocks that are compared
_TOKENS = 4  # simulated per choice
_AS_GOOD = 1.03  # of the best token time, about the timeline's error: among these the deepest ring wins


@dataclass(frozen=True)
class Speeds:
    """Speeds that the placement is chosen for; the defaults are a laptop's. Only their proportions matter.

    The last two speak for more than one block in the ring: with one nothing is loaded during the `turn`, since the
    first streamed block of the next token is already there, and every load has a `start`.
    """

    disk: float = 1e9  # bytes per second
    compute: float = 15e9  # bytes of weights per second
    exchange: float = 0.0  # seconds per allreduce
    turn: float = 0.0  # seconds from the last block of a token to the first of the next, that allreduce aside
    start: float = 0.0  # seconds that a load takes longer if the disk was idle before it

    def costs(self, sizes: Sequence[int]) -> Costs:
        """Seconds per block of these sizes."""
        exchange = [self.exchange] * (len(sizes) - 1) + [self.exchange + self.turn]
        return Costs([s / self.compute for s in sizes], exchange, [s / self.disk for s in sizes], start=self.start)


@dataclass(frozen=True)
class Placement:
    """The blocks that stay, and the ring that the others are streamed through. Sizes in bytes of memory."""

    sizes: tuple[int, ...]
    resident: frozenset[int]
    ring: Ring

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks that stay."""
        return _sum(self.resident, self.sizes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in all."""
        return self.resident_bytes + self.ring.size

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from disk per token."""
        return sum(self.sizes) - self.resident_bytes

    def renumbered(self, numbers: Sequence[int], sizes: Sequence[int]) -> "Placement":
        """The same, where block b is now `numbers[b]`, and some that stay have become one; `sizes` are of those now."""
        ring = replace(self.ring, blocks=tuple(numbers[block] for block in self.ring.blocks))
        return Placement(tuple(sizes), frozenset(numbers[block] for block in self.resident), ring)


def place(sizes: Sequence[int], budget: int, speeds: Speeds | None = None) -> Placement:
    """The fastest placement of blocks of `sizes` bytes (in order of use) in at most `budget` bytes.

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
    """The paper's placement: `window` blocks in memory at once, and one FFN block kept in every `retain` (0: none).

    `kinds` are the blocks', in order of use. A window that spans all streamed blocks keeps them all.
    """
    ffn = [block for block, kind in enumerate(kinds_of(len(sizes), kinds)) if kind == "ffn"]
    kept = set(ffn[retain - 1 :: retain] if retain else ())
    kept.update(block for block, size in enumerate(sizes) if not size)
    streamed = [block for block in range(len(sizes)) if block not in kept]
    if window >= len(streamed):
        return Placement(tuple(sizes), frozenset(range(len(sizes))), EMPTY)
    return Placement(tuple(sizes), frozenset(kept), smallest(streamed, sizes, max(1, window)))


def kinds_of(blocks: int, kinds: Sequence[BlockKind] | None) -> tuple[BlockKind, ...]:
    """Of each of so many blocks, in order of use; those of the paper's layers where `kinds` are not given."""
    found = tuple(islice(cycle(PAPERS_LAYER), blocks) if kinds is None else kinds)
    assert len(found) == blocks, f"{blocks} blocks, but {len(found)} kinds"
    return found


def _choices(sizes: Sequence[int], budget: int) -> Iterator[Placement]:
    """For some ring sizes and each number of large blocks kept, as many small ones as still fit, in every layout."""
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
                kept.update(_most(small, sizes, room))
                kept.update(_more(kept, sizes, budget - size - _sum(kept, sizes)))
                streamed = [block for block in range(len(sizes)) if block not in kept]
                for ring in layouts(streamed, sizes, size):
                    yield Placement(tuple(sizes), frozenset(kept), ring)


def _most(items: Sequence[int], sizes: Sequence[int], room: int) -> list[int]:
    """As many of `items`, evenly spaced, as `room` bytes take."""
    choices = (spread(items, count) for count in range(len(items), 0, -1))
    return next((chosen for chosen in choices if _sum(chosen, sizes) <= room), [])


def _more(kept: set[int], sizes: Sequence[int], room: int) -> list[int]:
    """Blocks of uneven sizes that fit into what is left, the largest first."""
    found = []
    for block in sorted(set(range(len(sizes))) - kept, key=lambda block: -sizes[block]):
        if sizes[block] <= room:
            found.append(block)
            room -= sizes[block]
    return found


def _sum(blocks: Iterable[int], sizes: Sequence[int]) -> int:
    return sum(sizes[block] for block in blocks)


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of `items`, evenly spaced."""
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]


def _two_kinds(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Blocks above and below the widest gap between sizes; equal sizes are all large, empty blocks are neither."""
    ordered = sorted(set(sizes) - {0})
    gaps = [(high / low, high) for low, high in pairwise(ordered)]
    bar = max(gaps)[1] if gaps else 0
    return [b for b, s in enumerate(sizes) if s >= max(bar, 1)], [b for b, s in enumerate(sizes) if 0 < s < bar]
