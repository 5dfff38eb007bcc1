"""Which shares the memories leave, for all pairs at once: polytopes; what is affine is least at a vertex."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Shares = tuple[float, float, float]
"""Of weights and of keys and values on the accelerator, and of weights on disk."""
Bound = float | F64
Bounds = tuple[Bound, Bound, Bound]
"""Of each share, for all pairs or `[pairs]`."""
Affine = tuple[F64, F64, F64, F64]
"""A constant, and what r_w, r_c and the disk's share add; `[pairs]` each."""

_EDGE = 1e-9  # of a share: as far beyond a limit still counts as within
_PARALLEL = 1e-9  # a determinant, of rows whose largest part is 1


class Vertices:
    """Where three limits of the shares meet within all others, `[shares, threes, pairs]`."""

    def __init__(self, memories: Sequence[tuple[Affine, float]], lower: Bounds, upper: Bounds) -> None:
        rows, limits = _limits(memories, lower, upper)
        rows = np.ascontiguousarray(np.moveaxis(rows, -1, 0))  # [shares, limits, pairs]
        threes = np.array(list(combinations(range(len(limits)), 3))).T
        one, two, three = (rows[:, chosen] for chosen in threes)
        first, second, third = _cross(two, three), _cross(three, one), _cross(one, two)
        volume = _dot(one, first)
        meet: Flags = np.abs(volume) > _PARALLEL
        crossing = limits[threes[0]] * first + limits[threes[1]] * second + limits[threes[2]] * third  # Cramer's rule
        self._at: F64 = crossing / np.where(meet, volume, 1.0)
        self._within = meet
        for row, limit in zip(rows.swapaxes(0, 1), limits, strict=True):
            self._within &= _dot(self._at, row) <= limit + _EDGE

    def least(self, function: Affine) -> F64:
        """The least value within all limits, `[pairs]`; infinite where nothing is."""
        constant, *slopes = function
        values = constant + _dot(self._at, np.array(slopes))
        found: F64 = np.where(self._within, values, np.inf).min(axis=0)
        return found


def _cross(one: F64, other: F64) -> F64:
    """The cross product of vectors of shares, `[shares, ...]`."""
    (a, b, c), (x, y, z) = one, other
    return np.stack([b * z - c * y, c * x - a * z, a * y - b * x])


def _dot(one: F64, other: F64) -> F64:
    """The product of such vectors; numpy's own sums of three values take several times as long."""
    found: F64 = one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
    return found


def _limits(memories: Sequence[tuple[Affine, float]], lower: Bounds, upper: Bounds) -> tuple[F64, F64]:
    """Left sides `[limits, pairs, shares]` and right sides `[limits, pairs]`: bounds, all weights, memories."""
    pairs = len(memories[0][0][0])
    fixed = np.vstack([np.eye(3), -np.eye(3), [1.0, 0.0, 1.0]])  # on the accelerator and on disk: no more than all
    rows = [np.broadcast_to(row, (pairs, 3)) for row in fixed]
    limits = [np.broadcast_to(limit, (pairs,)) for limit in (*upper, *(-share for share in lower), 1.0)]
    for (constant, *slopes), room in memories:
        row = np.stack(slopes, axis=-1)
        unit = np.abs(row).max(axis=-1)
        unit = np.where(unit > 0, unit, max(room, 1.0))  # bytes
        rows.append(row / unit[:, None])
        limits.append((room - constant) / unit)
    return np.array(rows), np.array(limits)
