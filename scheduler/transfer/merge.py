"""One ring that merges rings in the memories of several accelerators, with segments in the order of use.

One ring has one order of loads, so the single reader of the tier below can read for all accelerators in that order. It
still cannot deadlock: a use waits only for uses before it (`scheduler.model.ring`). The price is that no accelerator
can run ahead of another. If no segment is read in a fixed order, each accelerator has a ring of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import lcm

from scheduler.model.ring import EMPTY, Ring, with_lags


def merge_rings(rings: Sequence[Ring], sizes: Sequence[int]) -> Ring:
    """Return one ring with the uses of all `rings`, cycle by cycle, in the order of segment numbers.

    An offset is relative to the memory of the segment's own accelerator; the size is the sum of all memories. Segment n
    has `sizes[n]` bytes.
    """
    used = [ring for ring in rings if ring.blocks]
    if len(used) < 2:
        return used[0] if used else EMPTY
    uses: list[int] = []
    own: list[int] = []
    apart: list[int] = []  # offsets as if the memories were one: segments in two of them never overlap
    bases = accumulate((ring.size for ring in used), initial=0)
    places = [(_offsets(ring), base) for ring, base in zip(used, bases, strict=False)]
    of_segment = {segment: place for place in places for segment in place[0]}
    for cycle in range(lcm(*(_cycles(ring) for ring in used))):
        for segment in sorted(of_segment):
            offsets, base = of_segment[segment]
            offset = offsets[segment][cycle % len(offsets[segment])]
            uses.append(segment)
            own.append(offset)
            apart.append(base + offset)
    return replace(with_lags(uses, sizes, sum(ring.size for ring in used), apart), offsets=tuple(own))


def _offsets(ring: Ring) -> Mapping[int, list[int]]:
    """Return the offsets of each segment, one for each cycle in the ring's period."""
    found: dict[int, list[int]] = {}
    for segment, offset in zip(ring.blocks, ring.offsets, strict=True):
        found.setdefault(segment, []).append(offset)
    return found


def _cycles(ring: Ring) -> int:
    return len(ring.blocks) // len(set(ring.blocks))
