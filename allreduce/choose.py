"""Choosing the algorithm per payload size: predict all from the links, time the likely ones, take the fastest.

Predictions assume that links do not disturb each other. On one Wi-Fi access point they share the air, so what is
predicted to be near the best is timed with real sums before it is chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from allreduce.base import F32, Work, idle
from allreduce.flight import IN_FLIGHT
from allreduce.measure import share
from allreduce.networked import Networked
from allreduce.predict import PREDICTIONS, predict
from allreduce.transport import Transport
from tpi.topology.links import LinkTable

Row = Callable[[Networked, F32, int, Work], float]

_WORTH_TIMING = 2.0  # algorithms predicted to take up to so many times the least
_BUDGET_S = 1.0  # for timing one column, if that is enough for the least number of sums
_PASSES = (2, 4)  # at least and at most, of which the least disturbed counts
_SUMS = (2, 6)  # timed in a row in each pass, at least and at most
_WORK_S = 0.1  # the longest work between sums that is done for the sake of timing
_ODD = 3.0  # times more or less than predicted, and by
_ODD_S = 0.005  # seconds: then links that were measured before have changed
_PROBE = 4  # part of the work that tells how long all of it takes


Times = dict[str, tuple[float, float, float]]
"""Seconds by algorithm. Measured: of a decode sum; of a block of prefill, computed and summed; of one in two halves
that overlap. Predicted: of a decode sum, of a prefill sum, and of half of one.
"""


@dataclass(frozen=True)
class Choice:
    """The algorithms to use, and why. Times in seconds of one allreduce."""

    decode: str
    prefill: str
    overlap: bool  # whether a prefill sum goes in two halves, so that one half of the tokens computes meanwhile
    decode_values: int
    prefill_values: int
    predicted: Times
    measured: Times  # 0 where it was not timed
    links_age_s: float = field(default=0.0, compare=False)  # on the master: of the oldest link that it remembered

    def name_for(self, values: int) -> str:
        """The algorithm for a payload of `values`: that of the nearer of the two sizes, by ratio."""
        return self.decode if values * values <= self.decode_values * self.prefill_values else self.prefill

    def fields(self) -> dict[str, Any]:
        """For people and JSON: what was chosen, and the times by algorithm in milliseconds, as `Times` has them."""
        times = {
            f"{kind}_ms": {name: [1e3 * seconds for seconds in row] for name, row in rows.items()}
            for kind, rows in (("predicted", self.predicted), ("measured", self.measured))
        }
        chosen = {"decode": self.decode, "prefill": self.prefill, "prefill_in_halves": self.overlap}
        return chosen | times | {"links_age_s": self.links_age_s}


def choose(
    groups: dict[str, Networked], links: LinkTable, decode_values: int, prefill_values: int, work: Work
) -> Choice:
    """Decide for all nodes. Every node calls it; the master's clock counts, and its decision is shared.

    `work` is what a node computes between two sums of prefill: some algorithms leave it more of its cores than others.
    Where it would keep people waiting for the start, sums are timed without it.
    """
    names, (wire, transport) = list(groups), _common(groups)
    sizes = (decode_values, prefill_values, prefill_values // IN_FLIGHT)
    predicted = {name: [predict(name, links, count, wire) for count in sizes] for name in names}
    timed = _time_columns(groups, predicted, sizes, work)
    seen = share(transport, timed.reshape(-1)).reshape(timed.shape)
    known = np.where(seen > 0, seen, np.inf)
    decode, whole, halves = (names[index] for index in known.argmin(axis=0))
    overlap = bool(known[:, 2].min() < known[:, 1].min())
    pairs, shared = _times(names, [predicted[name] for name in names]), _times(names, [row.tolist() for row in seen])
    prefill = halves if overlap else whole
    return Choice(decode, prefill, overlap, decode_values, prefill_values, pairs, shared)


def contradicts(predicted: Times, measured: Times) -> bool:
    """Whether what sums of decoding took says that the links are not those that were predicted from.

    Every algorithm that was timed must say so, in one direction: what else the machines do delays some of them only.
    """
    timed = [(predicted[name][0], row[0]) for name, row in measured.items() if row[0] > 0]
    slower = [took > _ODD * said and took - said > _ODD_S for said, took in timed]
    faster = [said > _ODD * took and said - took > _ODD_S for said, took in timed]
    return bool(timed) and (all(slower) or all(faster))


def _time_columns(
    groups: dict[str, Networked], predicted: dict[str, list[float]], sizes: Sequence[int], work: Work
) -> F32:
    """This node's times, `[algorithms, sizes]`, of the algorithms that are likely for a size; 0 for the others."""
    names = list(groups)
    pause = _seconds_of(work, groups[names[0]])
    if not 0 <= pause <= _WORK_S:  # or no number: a node's claim
        work, pause = idle, 0.0
    times = np.zeros((len(names), len(sizes)), np.float32)
    columns = zip(sizes, (_row, _row, _row_of_halves), (idle, work, work), strict=True)
    for column, (count, row, meanwhile) in enumerate(columns):
        able = {name: predicted[name][column] for name in names if row is _row or groups[name].overlaps}
        likely = {name: seconds for name, seconds in able.items() if seconds <= _WORTH_TIMING * min(able.values())}
        once = sum(likely.values()) + (len(likely) * pause if meanwhile is work else 0.0)
        for name, took in _time(groups, list(likely), once, row, np.zeros(count, np.float32), meanwhile).items():
            times[names.index(name), column] = took
    return times


def _common(groups: dict[str, Networked]) -> tuple[str, Transport]:
    """Wire and transport of all."""
    first = next(iter(groups.values()))
    return first.wire, first.transport


def _times(names: list[str], rows: Sequence[Sequence[float]]) -> Times:
    return {name: (row[0], row[1], row[2]) for name, row in zip(names, rows, strict=True)}


def _time(
    groups: dict[str, Networked], likely: Sequence[str], once: float, row: Row, values: F32, work: Work
) -> dict[str, float]:
    """Seconds of a real sum of `values` by each of the `likely` algorithms; all should take about `once` together.

    They are timed in rows of one algorithm, the first of a row not counted: a node may be done before the others, and
    then waits for them in the next sum. The rows take turns, and each algorithm's quickest counts, since what else the
    machines do only ever adds.
    """
    passes = _PASSES[once * _PASSES[1] * (1 + _SUMS[0]) <= _BUDGET_S]
    count = int(min(max(_BUDGET_S / once / passes - 1, _SUMS[0]), _SUMS[1]))
    rows = [[row(groups[name], values, count, work) for name in likely] for _ in range(passes)]
    return {name: min(seconds) for name, seconds in zip(likely, zip(*rows, strict=True), strict=True)}


def _seconds_of(work: Work, group: Networked) -> float:
    """Seconds that all of `work` takes the slowest node, by a part of it; the same on every node."""
    seconds = np.zeros(group.size, np.float32)
    work(_PROBE)  # the first brings up caches
    started = perf_counter()
    work(_PROBE)
    seconds[group.rank] = _PROBE * (perf_counter() - started)
    return float(group.allreduce(seconds).max())


def _row(group: Networked, values: F32, count: int, work: Work) -> float:
    """Mean seconds of `count` sums in a row that follow one untimed."""
    group.allreduce(values)
    started = perf_counter()
    for _ in range(count):
        work(1)
        group.allreduce(values)
    return (perf_counter() - started) / count


def _row_of_halves(group: Networked, half: F32, count: int, work: Work) -> float:
    """As `_row`, each sum as halves of which one or more are always under way."""
    for _ in range(IN_FLIGHT):
        group.start(half)
    started = perf_counter()
    for _ in range(IN_FLIGHT * count):
        group.finish()
        work(IN_FLIGHT)
        group.start(half)
    ended = perf_counter()
    for _ in range(IN_FLIGHT):
        group.finish()
    return (ended - started) / count


def candidates() -> tuple[str, ...]:
    """Algorithms that a choice is made from."""
    return tuple(PREDICTIONS)
