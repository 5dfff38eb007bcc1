"""Where streamed blocks lie in one preallocated byte ring, decided once: fixed addresses, no allocation later.

Streamed blocks are used in a fixed cyclic order. `Ring` gives every use in a period (one or more cycles) an address,
such that each block is contiguous, and derives its *lag*: use n may be loaded as soon as use n - lag, and with it all
before it, have been released. Loads and releases both happen in the order of use, so one number per use is all the
synchronisation there is.

**A hold never deadlocks** if the ring is as large as the largest streamed block (every layout needs that much). Proof:
lag >= 1, so the load of use n waits for nothing but releases of uses before n; when a caller that holds nothing waits
for n, all of those have happened.

**Loads overlap computing everywhere** (every lag >= 2: use n + 1 loads while n is held) exactly if the ring is as large
as the largest two neighbours together. Necessary, since both are in memory at once; sufficient, since neighbours can
lie at opposite ends (`_two_ended`), over two cycles if their number is odd.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from tpi.devices.pages import PAGE

_LONGEST = 4096  # uses in a period; a layout that needs a longer one is not considered
_STEPS = 16  # sizes tried between the least that could do and the size that surely does


@dataclass(frozen=True)
class Ring:
    """A byte ring and the place of each use in it. `blocks`, `offsets` and `lags` have one entry per use of a period.

    `size` and `offsets` are in bytes, multiples of the page size if the block sizes are.
    """

    size: int
    blocks: tuple[int, ...]
    offsets: tuple[int, ...]
    lags: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Blocks that are in memory at once, the one in use included, everywhere in the cycle. 0: nothing streamed."""
        return min(self.lags, default=0)


EMPTY = Ring(0, (), (), ())


def layouts(blocks: Sequence[int], sizes: Sequence[int], size: int) -> list[Ring]:
    """Ways to lay `blocks` (in order of use; bytes of block b: `sizes[b]`) in a ring of `size` bytes.

    None if the largest block is larger than the ring.
    """
    if not blocks:
        return [EMPTY]
    if max(sizes[block] for block in blocks) > size:
        return []
    return [_bump(blocks, sizes, size), _two_ended(blocks, sizes, size), _equal_slots(blocks, sizes, size)]


def neighbours(sizes: Sequence[int], depth: int) -> int:
    """Bytes of the largest `depth` blocks that follow one another in the cycle (all of them if there are fewer)."""
    around = list(sizes) * 2
    depth = min(depth, len(sizes))
    return max(sum(around[at : at + depth]) for at in range(len(sizes)))


def smallest(blocks: Sequence[int], sizes: Sequence[int], depth: int) -> Ring:
    """The smallest ring found in which `depth` blocks are in memory at once (fewer if fewer are streamed).

    At least the largest sum of `depth` neighbours; at most `depth` times the largest block. Exact for depths 1 and 2.
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
    """One after the other; back to the start when the next does not fit before the end, and at each cycle."""
    offsets, at = [], 0
    for block in blocks:
        at = 0 if at + sizes[block] > size else at
        offsets.append(at)
        at += sizes[block]
    return with_lags(blocks, sizes, size, offsets)


def _two_ended(blocks: Sequence[int], sizes: Sequence[int], size: int) -> Ring:
    """At the start and at the end of the ring by turns."""
    uses = list(blocks) * (1 if len(blocks) % 2 == 0 else 2)
    offsets = [0 if use % 2 == 0 else size - sizes[block] for use, block in enumerate(uses)]
    return with_lags(uses, sizes, size, offsets)


def _equal_slots(blocks: Sequence[int], sizes: Sequence[int], size: int) -> Ring:
    """As many slots of the largest block's size as there is room for, by turns."""
    largest = max(sizes[block] for block in blocks)
    slots = max(1, min(size // largest, _LONGEST // len(blocks)))
    uses = list(blocks) * (lcm(len(blocks), slots) // len(blocks))
    return with_lags(uses, sizes, size, [use % slots * largest for use in range(len(uses))])


def with_lags(uses: Sequence[int], sizes: Sequence[int], size: int, offsets: Sequence[int]) -> Ring:
    """The ring of `size` bytes in which the n-th of `uses`, a block, lies at `offsets[n]`; `sizes` are by block."""
    period = len(uses)

    def overlaps(one: int, other: int) -> bool:
        return offsets[one] < offsets[other] + sizes[uses[other]] and offsets[other] < offsets[one] + sizes[uses[one]]

    lags = [next(d for d in range(1, period + 1) if overlaps(use, (use - d) % period)) for use in range(period)]
    return Ring(size, tuple(uses), tuple(offsets), tuple(lags))
