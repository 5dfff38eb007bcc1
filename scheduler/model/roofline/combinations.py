"""Linear programs for all pairs (batch size, number of micro-batches), each computed in given places.

A policy has three shares: of weights on the accelerator (r_w), of keys and values there (r_c), and of weights on disk.
The seconds of every roof, and the bytes of each memory, are affine in these shares. So four of their values determine
them: with all shares 0, and with one share 1. The best shares of a pair, in its best places, are the solution of a
mixed integer linear program (HiGHS).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import numpy as np
import numpy.typing as npt

from scheduler.model.highs import solve_milp
from scheduler.model.offload.work import REQUEST_PHASES, RequestPhase
from scheduler.model.roofline.latency import (
    F64,
    PolicyPoint,
    accelerator_bytes,
    head_seconds,
    host_bytes,
    most_weights,
    roofs,
)
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, PolicyLimits
from scheduler.model.roofline.vertices import Affine, Shares, Vertices

I64 = npt.NDArray[np.int64]
_STAYS = 1e-6  # tiny reward, in units of time, for resident weights, keys and values that change nothing else
_EDGE = 1e-6  # share of a memory by which an excess still counts as fitting
_DIGITS = 9  # significant digits of a share


class Combination:
    """All pairs (batch size, number of micro-batches), with attention, neurons and residuals in given places.

    A place is the host or the accelerator. Keys and values are all on one side or, if `divided`, on both. Their share
    on the accelerator is a multiple of 1 / `heads`; with `heads` 0 it is any number from 0 to 1.
    """

    def __init__(
        self, problem: BatchProblem, batches: F64, parts: F64, attention: bool, ffn: bool, adds: bool, divided: bool
    ) -> None:
        self.attention, self.ffn, self.adds = attention, ffn, adds
        self.batches, self.parts = batches, parts
        self.heads = problem.limits.kv_heads if divided else 1
        base = PolicyPoint(batches, parts, int(attention), int(ffn), adds=int(adds), divided=int(divided))
        self.lower, self.upper = _allowed(problem.limits, attention, divided, most_weights(problem, base))
        self.seconds: dict[RequestPhase, dict[str, Affine]] = {}
        for phase in REQUEST_PHASES:
            corners = [roofs(problem, point, phase) for point in _corners(base)]
            self.seconds[phase] = {
                name: _affine([corner[name] for corner in corners], len(batches)) for name in corners[0]
            }
        device = problem.machine.accelerator
        self.memory = [
            (_affine([host_bytes(problem, point) for point in _corners(base)], len(batches)), problem.machine.memory)
        ]
        if device is not None:
            there = _affine([accelerator_bytes(problem, point) for point in _corners(base)], len(batches))
            self.memory.append((there, device.memory))
        self.steps = dict(zip(REQUEST_PHASES, (1, problem.request.answer - 1), strict=True))
        self.head = np.array([problem.request.answer * head_seconds(problem, batch) for batch in batches])
        self._layers = problem.layer.layers
        self.rough = self._rough()
        self.bounds: F64 = np.full(len(batches), inf)  # set by `look_at`

    def counted(self, shares: Shares) -> Shares:
        """Return `shares` in the units of the linear program: keys and values in heads, unless `heads` is 0."""
        weights, kv, disk = shares
        return weights, kv * (self.heads or 1), disk

    def share(self, counted: float) -> float:
        """Return the share of keys and values from its value in the linear program, the inverse of `counted`."""
        return round(counted) / self.heads if self.heads else counted

    def bound(self, at: int) -> float:
        """Return a lower bound of the seconds per sequence for pair number `at`, if each head is on one device.

        It is at least the value in `bounds`, which allows a head to be divided between two devices.
        """
        if self.heads <= 1:
            return float(self.bounds[at])
        kept = np.arange(1, self.heads) / self.heads
        each = np.full(len(kept), at)
        return float(self._least(each, kept, kept).min())

    def look_at(self, pairs: I64) -> None:
        """Set `bounds` of the pairs numbered `pairs`: lower bounds of the seconds per sequence.

        A bound is infinite if the pair does not fit into the memories. For each roof, the bound takes the shares with
        the fewest seconds among all that fit. If keys and values are not divided, both sides are tried.
        """
        (_, kv, _), (_, most_kv, _) = self.lower, self.upper
        sides = [(side, side) for side in sorted({kv, most_kv})] if self.heads == 1 else [(kv, most_kv)]
        self.bounds[pairs] = np.min([self._least(pairs, *side) for side in sides], axis=0)

    def _rough(self) -> F64:
        """Return lower bounds of the seconds per sequence, `[pairs]`, that are quicker to calculate than those in
        `bounds`.

        Each roof, and each memory, is calculated with the shares that suit it best, whether or not these fit together.
        So these bounds are at most those in `bounds`.
        """
        total = self.head.copy()
        for phase, steps in self.steps.items():
            if steps:  # answers of one token have no decode steps
                times = [self._least_of(roof) for roof in self.seconds[phase].values()]
                total += steps * self._layers * np.max(times, axis=0)
        for memory, room in self.memory:
            total[self._least_of(memory) > room * (1 + _EDGE)] = inf
        found: F64 = total / self.batches
        return found

    def _least_of(self, affine: Affine) -> F64:
        """Return the least value of the function `affine` over all allowed shares, `[pairs]`."""
        constant, *slopes = affine
        ends = zip(slopes, self.lower, self.upper, strict=True)
        least: F64 = constant + sum(np.minimum(slope * low, slope * high) for slope, low, high in ends)
        return least

    def _least(self, pairs: I64, kv: float | F64, most_kv: float | F64) -> F64:
        """Return lower bounds of the seconds per sequence for the pairs numbered `pairs`.

        The share of keys and values on the accelerator is from `kv` to `most_kv`.
        """
        (weights, _, disk), (most_weights, _, most_disk) = self.lower, self.upper
        memory = [(_of_pairs(affine, pairs), room) for affine, room in self.memory]
        left = Vertices(memory, (weights, kv, disk), (most_weights, most_kv, most_disk))
        total = self.head[pairs]
        for phase, steps in self.steps.items():
            if steps:
                times = [left.least(_of_pairs(roof, pairs)) for roof in self.seconds[phase].values()]
                total = total + steps * self._layers * np.max(times, axis=0)
        return total / self.batches[pairs]


def _of_pairs(affine: Affine, pairs: I64) -> Affine:
    constant, weights, kv, disk = affine
    return constant[pairs], weights[pairs], kv[pairs], disk[pairs]


def _allowed(limits: PolicyLimits, attention: bool, divided: bool, most: float) -> tuple[Shares, Shares]:
    """Return the least and the largest allowed value of each share.

    `most` is the share of weights that the accelerator computes with; other weights need not be resident on it.
    """
    weights, kv = limits.weights, limits.kv
    first, last = float(kv == "gpu"), float(attention and kv != "ram")
    if divided:
        first, last = (1 / limits.kv_heads, 1 - 1 / limits.kv_heads) if limits.kv_heads else (0.0, 1.0)
    least = (most if weights == "gpu" else 0.0, first, float(weights == "disk"))
    upper = (most if weights in (None, "gpu") else 0.0, last, float(weights in (None, "disk")))
    return least, upper


def _corners(base: PolicyPoint) -> list[PolicyPoint]:
    return [base, replace(base, weights=1.0), replace(base, kv=1.0), replace(base, disk=1.0)]


def _affine(values: list[object], count: int) -> Affine:
    """Return an affine function of the shares, for `count` pairs, from its values at the four points of `_corners`."""
    constant, *others = (np.broadcast_to(np.asarray(value, np.float64), (count,)) for value in values)
    weights, kv, disk = (other - constant for other in others)
    return np.array(constant), weights, kv, disk


def solve_pair(
    problem: BatchProblem, tables: list[Combination], at: int, bound: float
) -> tuple[float, BatchPolicy] | None:
    """Return the fewest seconds per sequence for one pair (batch size, number of micro-batches), and the best policy.

    Return None if no policy fits.

    Args:
        problem: the problem of a node.
        tables: the combinations of places to choose from.
        at: the number of the pair.
        bound: a lower bound of the seconds per sequence. It only scales the program's numbers.
    """
    from scipy.optimize import Bounds, LinearConstraint

    count = 4 * len(tables)
    scale = (
        bound * tables[0].batches[at] / (problem.layer.layers * problem.request.answer)
    )  # about the seconds of a layer
    objective = np.zeros(count + 2)
    for number, phase in enumerate(REQUEST_PHASES):
        objective[count + number] = tables[0].steps[phase]
    objective[1:count:4] = objective[2:count:4] = -_STAYS * problem.request.answer
    rows = list(_rows(tables, at, scale))
    upper = np.concatenate([*([1.0, *table.counted(table.upper)] for table in tables), [inf, inf]])
    whole = np.zeros(count + 2)
    whole[0:count:4] = 1
    whole[2:count:4] = [table.heads > 0 for table in tables]
    limits = np.array([limit for _, limit in rows])
    matrix = np.array([row for row, _ in rows])
    one = np.zeros(count + 2)
    one[0:count:4] = 1
    found = solve_milp(
        objective,
        integrality=whole,
        bounds=Bounds(0, upper),
        constraints=[LinearConstraint(matrix, -inf, limits), LinearConstraint(one[None], 1, 1)],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    chosen = int(np.argmax(found.x[0:count:4]))
    table = tables[chosen]
    weights, kv, disk = found.x[4 * chosen + 1 : 4 * chosen + 4].round(_DIGITS)
    shares = np.clip((weights, table.share(kv), disk), 0.0, table.upper)
    times = sum(table.steps[phase] * float(found.x[count + number]) for number, phase in enumerate(REQUEST_PHASES))
    total = problem.layer.layers * scale * times + float(table.head[at])
    weights, kv, disk = map(float, shares)
    batch, parts = int(table.batches[at]), int(table.parts[at])
    policy = BatchPolicy(batch, parts, table.attention, table.ffn, weights, kv, disk, table.adds)
    return total / table.batches[at], policy


def _rows(tables: list[Combination], at: int, scale: float) -> Iterator[tuple[F64, float]]:
    """Yield the left side and the limit of each inequality of the linear program for pair number `at` of batch sizes.

    The unknowns are four for each combination: whether it is chosen, and its three shares as `Combination.counted`
    counts them. Two more are the seconds of a layer in each phase, in units of `scale` seconds.
    """
    count = 4 * len(tables)

    def row(of: Callable[[Combination], Affine], unit: float) -> F64:
        found = np.zeros(count + 2)
        for number, table in enumerate(tables):
            found[4 * number : 4 * number + 4] = [part[at] / unit for part in of(table)]
            found[4 * number + 2] /= table.heads or 1
        return found

    for number, phase in enumerate(REQUEST_PHASES):
        for name in tables[0].seconds[phase]:
            found = row(lambda table, phase=phase, name=name: table.seconds[phase][name], scale)  # type: ignore[misc]
            found[count + number] = -1.0
            yield found, 0.0
    for which, (_, room) in enumerate(tables[0].memory):
        yield row(lambda table, which=which: table.memory[which][0], room), 1.0  # type: ignore[misc]
    for number, table in enumerate(tables):
        lower, most = table.counted(table.lower), table.counted(table.upper)
        for share in range(3):
            found = np.zeros(count + 2)
            found[4 * number + 1 + share], found[4 * number] = 1.0, -most[share]
            yield found, 0.0
            found = np.zeros(count + 2)
            found[4 * number + 1 + share], found[4 * number] = -1.0, lower[share]
            yield found, 0.0
        found = np.zeros(count + 2)
        found[4 * number + 1], found[4 * number + 3], found[4 * number] = 1.0, 1.0, -1.0
        yield found, 0.0
