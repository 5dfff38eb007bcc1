"""The shares that fit into the memories, as a polytope for each pair: affine functions are least at its vertices."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Shares = tuple[float, float, float]
"""The shares of weights and of keys and values on the accelerator, and of weights on disk."""
Bound = float | F64
Bounds = tuple[Bound, Bound, Bound]
"""A bound of each share, the same for all pairs or `[pairs]`."""
Affine = tuple[F64, F64, F64, F64]
"""An affine function of the shares: a constant, and the slopes of r_w, r_c and the disk's share; `[pairs]` each."""

_EDGE = 1e-9  # excess of a share over a limit that still counts as within
_PARALLEL = 1e-9  # determinant below which limits count as parallel; the largest part of each row is 1


class Vertices:
    """The vertices of the allowed shares, for each pair: points where three limits meet, within all other limits.

    Arrays are `[3, threes, pairs]`: the shares, the choices of three limits, and the pairs. Shares come first because
    sums over three adjacent numbers would take ten times as long.
    """

    def __init__(self, memories: Sequence[tuple[Affine, float]], lower: Bounds, upper: Bounds) -> None:
        rows, limits = _limits(memories, lower, upper)
        one, two, three = np.array([each for each in combinations(range(len(limits)), 3) if not _opposite(each)]).T
        a, b, c = rows[:, one], rows[:, two], rows[:, three]
        sides = _cross(b, c), _cross(c, a), _cross(a, b)
        size = _product(a, sides[0])  # the determinant of the three rows
        meet: Flags = np.abs(size) > _PARALLEL
        size[~meet] = 1.0
        ends = limits[one], limits[two], limits[three]
        self._at: F64 = sum(side * end for side, end in zip(sides, ends, strict=True)) / size  # Cramer's rule
        self._within = meet
        for number, limit in enumerate(limits):
            self._within &= _product(self._at, rows[:, number, None]) <= limit + _EDGE

    def least(self, function: Affine) -> F64:
        """Return the least value of an affine function within all limits, `[pairs]`; infinite if no point fits."""
        constant, *slopes = function
        values = constant + _product(self._at, slopes)
        found: F64 = np.where(self._within, values, np.inf).min(axis=0)
        return found


def _product(one: F64, other: F64 | Sequence[F64]) -> F64:
    found: F64 = one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
    return found


def _cross(one: F64, other: F64) -> F64:
    (a, b, c), (d, e, f) = one, other
    return np.array([b * f - c * e, c * d - a * f, a * e - b * d])


def _opposite(rows: tuple[int, ...]) -> bool:
    """Return True if two of the limits numbered `rows` are the lower and the upper bound of one share.

    Such limits are never reached together.
    """
    return any(number + 3 in rows for number in rows if number < 3)


def _limits(memories: Sequence[tuple[Affine, float]], lower: Bounds, upper: Bounds) -> tuple[F64, F64]:
    """Return the left sides `[shares, limits, pairs]` and right sides `[limits, pairs]` of all limits.

    The limits are each share's bounds, the sum of the shares of weights (at most 1), and the memories.
    """
    pairs = len(memories[0][0][0])
    fixed = np.vstack([np.eye(3), -np.eye(3), [1.0, 0.0, 1.0]])  # last: the shares of weights add up to at most 1
    rows = [np.broadcast_to(row[:, None], (3, pairs)) for row in fixed]
    limits = [np.broadcast_to(limit, (pairs,)) for limit in (*upper, *(-share for share in lower), 1.0)]
    for (constant, *slopes), room in memories:
        row = np.array(slopes)
        unit = np.abs(row).max(axis=0)
        unit = np.where(unit > 0, unit, max(room, 1.0))
        rows.append(row / unit)
        limits.append((room - constant) / unit)
    return np.stack(rows, axis=1), np.array(limits)
