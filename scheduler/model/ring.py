"""The layout of streamed blocks in one preallocated byte ring: addresses are fixed, nothing is allocated later.

Streamed blocks are used in a fixed cyclic order. `Ring` gives every use in a period (one or more cycles) an address,
such that each block is contiguous, and derives the use's *lag*: use n may be loaded once use n - lag and all earlier
uses have been released. Loads and releases both happen in the order of use, so this one number per use is all the
synchronisation that is needed.

**A hold never deadlocks** if the ring is at least as large as the largest streamed block (every layout needs that
much). Proof: lag >= 1, so the load of use n waits only for releases of uses before n. When a caller that holds nothing
waits for n, all these releases have happened.

**Loads overlap computing everywhere** (every lag >= 2: use n + 1 loads while n is held) exactly if the ring is at least
as large as the largest two neighbours together. This is necessary because both are in memory at once. It is sufficient
because neighbours can lie at opposite ends (`_two_ended`), over two cycles if their number is odd.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from tpi.devices.pages import PAGE

_LONGEST = 4096  # the most uses in a period; layouts with longer periods are not considered
_STEPS = 16  # sizes tried between the smallest possible size and one that always suffices


@dataclass(frozen=True)
class Ring:
    """A byte ring, and the place in it of each use of a block.

    A period is the shortest series of uses whose places repeat. `blocks`, `offsets` and `lags` have one entry for each
    use of a period. `size` and `offsets` are in bytes; they are multiples of the page size if the block sizes are.
    """

    size: int
    blocks: tuple[int, ...]
    offsets: tuple[int, ...]
    lags: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Least number of blocks that can be in memory at once, the block in use included; 0 if nothing is streamed."""
        return min(self.lags, default=0)


EMPTY = Ring(0, (), (), ())


def layouts(blocks: Sequence[int], sizes: Sequence[int], size: int) -> list[Ring]:
    """Return possible layouts of `blocks` (in order of use, `sizes[b]` bytes for block b) in a ring of `size` bytes.

    The list is empty if the largest block is larger than the ring.
    """
    if not blocks:
        return [EMPTY]
    if max(sizes[block] for block in blocks) > size:
        return []
    return [_bump(blocks, sizes, size), _two_ended(blocks, sizes, size), _equal_slots(blocks, sizes, size)]


def neighbours(sizes: Sequence[int], depth: int) -> int:
    """Return the bytes of the largest `depth` consecutive blocks in the cycle; of all blocks if there are fewer."""
    around = list(sizes) * 2
    depth = min(depth, len(sizes))
    return max(sum(around[at : at + depth]) for at in range(len(sizes)))


def smallest(blocks: Sequence[int], sizes: Sequence[int], depth: int) -> Ring:
    """Return a ring that has room for `depth` blocks at once, or for all blocks if there are fewer.

    The ring is the smallest of several layouts. Its size is at least the largest sum of `depth` neighbours and at most
    `depth` times the largest block. For depths 1 and 2, no smaller ring exists.
    """
    depth = min(depth, len(blocks))
    if not depth:
        return EMPTY
    streamed = [sizes[block] for block in blocks]
    low, high = neighbours(streamed, depth), depth * max(streamed)
    step = max(PAGE, (high - low) // _STEPS // PAGE * PAGE)
    found = (ring for size in [*range(low, high, step), high] for ring in layouts(blocks, sizes, size))
    return next(ring for ring in found if ring.depth >= depth)


def _bump(blocks: Sequence[int], sizes: Sequence[int], size: int) -> Ring:
    """Place blocks one after the other.

    Start again at offset 0 with each cycle, or when the next block does not fit.
    """
    offsets, at = [], 0
    for block in blocks:
        at = 0 if at + sizes[block] > size else at
        offsets.append(at)
        at += sizes[block]
    return with_lags(blocks, sizes, size, offsets)


def _two_ended(blocks: Sequence[int], sizes: Sequence[int], size: int) -> Ring:
    """Place the blocks alternately at the start and at the end of a ring of `size` bytes."""
    uses = list(blocks) * (1 if len(blocks) % 2 == 0 else 2)
    offsets = [0 if use % 2 == 0 else size - sizes[block] for use, block in enumerate(uses)]
    return with_lags(uses, sizes, size, offsets)


def _equal_slots(blocks: Sequence[int], sizes: Sequence[int], size: int) -> Ring:
    """Place blocks in turn in equal slots of the largest block's size, of which the ring has as many as fit."""
    largest = max(sizes[block] for block in blocks)
    slots = max(1, min(size // largest, _LONGEST // len(blocks)))
    uses = list(blocks) * (lcm(len(blocks), slots) // len(blocks))
    return with_lags(uses, sizes, size, [use % slots * largest for use in range(len(uses))])


def with_lags(uses: Sequence[int], sizes: Sequence[int], size: int, offsets: Sequence[int]) -> Ring:
    """Return the ring of `size` bytes in which use number n of a period is of block `uses[n]`, at offset `offsets[n]`.

    Block b has `sizes[b]` bytes. The lags are calculated (see the module).
    """
    period = len(uses)

    def overlaps(one: int, other: int) -> bool:
        return offsets[one] < offsets[other] + sizes[uses[other]] and offsets[other] < offsets[one] + sizes[uses[one]]

    lags = [next(d for d in range(1, period + 1) if overlaps(use, (use - d) % period)) for use in range(period)]
    return Ring(size, tuple(uses), tuple(offsets), tuple(lags))
