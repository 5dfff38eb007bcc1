"""Rings in the memories of several accelerators as one, in which segments follow one another in the order of use.

One ring has one order of loads, so that whoever reads the tier below for all of them reads it in that order. It still
cannot deadlock: a use waits for nothing but uses before it (`scheduler.model.ring`). The price is that no accelerator
runs ahead of another: where nothing is read in an order, each has a ring of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import lcm

from scheduler.model.ring import EMPTY, Ring, with_lags


def merged(rings: Sequence[Ring], sizes: Sequence[int]) -> Ring:
    """The uses of all rings, cycle by cycle in the order of their numbers; bytes of segment n: `sizes[n]`.

    Offsets stay those of each one's own memory; the size is of all of them together.
    """
    used = [ring for ring in rings if ring.blocks]
    if len(used) < 2:
        return used[0] if used else EMPTY
    uses: list[int] = []
    own: list[int] = []
    apart: list[int] = []  # as if the memories lay one behind the other: what is in two of them never overlaps
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
    """Where each segment lies, cycle by cycle of the ring's period."""
    found: dict[int, list[int]] = {}
    for segment, offset in zip(ring.blocks, ring.offsets, strict=True):
        found.setdefault(segment, []).append(offset)
    return found


def _cycles(ring: Ring) -> int:
    return len(ring.blocks) // len(set(ring.blocks))
