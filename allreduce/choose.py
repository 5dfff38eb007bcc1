"""Choosing the algorithm per payload size: predict all from the links, time the likely ones, take the fastest.

Predictions assume that links do not disturb each other. On one Wi-Fi access point they share the air, so what is
predicted to be near the best is timed with real sums before it is chosen.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from allreduce.base import F32
from allreduce.measure import share
from allreduce.networked import Networked
from allreduce.predict import PREDICTIONS, predict
from tpi.links import LinkTable

_WORTH_TIMING = 2.0  # algorithms predicted to take up to so many times the least
_BUDGET_S = 1.0  # for timing one payload size, if that is enough for the least number of sums
_PASSES = 4  # of which the least disturbed counts
_SUMS = (2, 6)  # timed in a row in each pass, at least and at most


Times = dict[str, tuple[float, float]]  # seconds by algorithm, for decode and for prefill


@dataclass(frozen=True)
class Choice:
    """The algorithms to use, and why. Times in seconds of one allreduce."""

    decode: str
    prefill: str
    decode_values: int
    prefill_values: int
    predicted: Times
    measured: Times  # 0 where it was not timed
    reason: str

    def name_for(self, values: int) -> str:
        """The algorithm for a payload of `values`: that of the nearer of the two sizes, by ratio."""
        return self.decode if values * values <= self.decode_values * self.prefill_values else self.prefill


def choose(groups: dict[str, Networked], links: LinkTable, decode_values: int, prefill_values: int) -> Choice:
    """Decide for all members. Every member calls it; the master's clock counts, and its decision is shared."""
    names, sizes = list(groups), (decode_values, prefill_values)
    wire = groups[names[0]].wire
    predicted = {name: [predict(name, links, count, wire) for count in sizes] for name in names}
    measured = {name: [0.0, 0.0] for name in names}
    for column, count in enumerate(sizes):
        least = min(times[column] for times in predicted.values())
        likely = [name for name in names if predicted[name][column] <= _WORTH_TIMING * least]
        _time(groups, likely, count, column, predicted, measured)
    transport = groups[names[0]].transport
    seen = share(transport, np.array([measured[name] for name in names], np.float32).reshape(-1)).reshape(-1, 2)
    guess = np.array([predicted[name] for name in names])
    known = np.where(seen.any(axis=0), np.where(seen > 0, seen, np.inf), guess)
    best = [names[index] for index in known.argmin(axis=0)]
    shared = {name: (float(seen[i, 0]), float(seen[i, 1])) for i, name in enumerate(names)}
    pairs = {name: (times[0], times[1]) for name, times in predicted.items()}
    return Choice(best[0], best[1], decode_values, prefill_values, pairs, shared, _reason(best, pairs, shared))


def _time(
    groups: dict[str, Networked],
    likely: list[str],
    count: int,
    column: int,
    predicted: dict[str, list[float]],
    measured: dict[str, list[float]],
) -> None:
    """Fill in the seconds of a real sum of `count` values per likely algorithm, if there is more than one.

    They are timed in rows of one algorithm, the first of a row not counted: a member may be done before the others, and
    then waits for them in the next sum. The rows take turns, and each algorithm's quickest counts, since what else the
    machines do only ever adds.
    """
    if len(likely) == 1:
        return
    once = sum(predicted[name][column] for name in likely)
    row = int(min(max(_BUDGET_S / once / _PASSES - 1, _SUMS[0]), _SUMS[1]))
    values = np.zeros(count, np.float32)
    rows = [[_row(groups[name], values, row) for name in likely] for _ in range(_PASSES)]
    for name, seconds in zip(likely, zip(*rows, strict=True), strict=True):
        measured[name][column] = min(seconds)


def _row(group: Networked, values: F32, count: int) -> float:
    """Mean seconds of `count` sums in a row that follow one untimed."""
    group.allreduce(values)
    started = perf_counter()
    for _ in range(count):
        group.allreduce(values)
    return (perf_counter() - started) / count


def _reason(best: list[str], predicted: Times, measured: Times) -> str:
    def figures(column: int) -> str:
        return ", ".join(
            f"{name} {1e3 * predicted[name][column]:.2f}"
            + (f" (measured {1e3 * measured[name][column]:.2f})" if measured[name][column] else "")
            for name in sorted(predicted, key=lambda name: predicted[name][column])
        )

    return f"decode: {best[0]}; predicted ms: {figures(0)}. prefill: {best[1]}; predicted ms: {figures(1)}"


def candidates() -> tuple[str, ...]:
    """Algorithms that a choice is made from."""
    return tuple(PREDICTIONS)
