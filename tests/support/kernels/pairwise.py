"""Parameter grids, thinned: most faults need two values to meet, hardly any needs three."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases, one value of each of at least two axes: any two values of two axes meet in one. The same every time.

    Chosen greedily from all cases: the next is one in which most of the missing pairs meet.
    """
    grid = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {case: frozenset(combinations(enumerate(case), 2)) for case in grid}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(tuple(axis[at] for axis, at in zip(axes, best, strict=True)))
    return chosen
