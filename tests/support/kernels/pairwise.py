"""Reduced parameter grids: most faults need a combination of two values, hardly any of three."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases with one value of each axis, such that any two values of two axes occur together in a case.

    There must be at least two axes. The choice is greedy and always the same: the next case has the most missing pairs.
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
