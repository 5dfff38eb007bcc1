"""Choice of the algorithm per payload size: predict all from the links, time the likely ones, take the fastest.

Predictions assume that links do not disturb each other. On one Wi-Fi access point they share the air. So algorithms
predicted to be near the best are timed with real sums before one is chosen.
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

_WORTH_TIMING = 2.0  # algorithms are timed if predicted to take at most this many times the fastest
# seconds for timing the algorithms at one payload size; exceeded if the least number of sums takes longer
_BUDGET_S = 1.0
_PASSES = (2, 4)  # least and greatest number of passes; the fastest counts
_SUMS = (2, 6)  # least and greatest number of sums timed in each pass
_WORK_S = 0.1  # longest work between sums, in seconds, that is done for timing
_ODD = 3.0  # cached links have changed if a sum takes this many times as long as predicted, or the inverse,
_ODD_S = 0.005  # and differs by more than this many seconds
_PROBE = 4  # an n-th of the work is timed to estimate all of it


Times = dict[str, tuple[float, float, float]]
"""Seconds by algorithm, three columns.

Measured: a decode sum; a block of prefill, computed and summed; the same with the sum in two overlapping halves.
Predicted: a decode sum, a prefill sum, and half of a prefill sum.
"""


@dataclass(frozen=True)
class Choice:
    """The algorithms chosen for decode and prefill sums, with the predicted and measured seconds of an allreduce."""

    decode: str
    prefill: str
    overlap: bool  # a prefill sum is split in two halves; while one is summed, the other half's tokens are computed
    decode_values: int
    prefill_values: int
    predicted: Times
    measured: Times  # 0 if not timed
    # on the master: age in seconds of the oldest cached link; 0 on workers
    links_age_s: float = field(default=0.0, compare=False)

    def name_for(self, values: int) -> str:
        """Return the algorithm of decode or of prefill, whichever was chosen for a size nearer to `values` by ratio."""
        return self.decode if values * values <= self.decode_values * self.prefill_values else self.prefill

    @property
    def software(self) -> float | None:
        """Seconds that a decode sum took beyond what the links explain, or None if no decode sum was timed."""
        took = self.measured.get(self.decode, (0.0,))[0]
        return max(0.0, took - self.predicted[self.decode][0]) if took > 0 else None

    def fields(self) -> dict[str, Any]:
        """Return the chosen algorithms and all times as JSON fields. Times are lists of milliseconds, as in `Times`."""
        times = {
            f"{kind}_ms": {name: [1e3 * seconds for seconds in row] for name, row in rows.items()}
            for kind, rows in (("predicted", self.predicted), ("measured", self.measured))
        }
        chosen = {"decode": self.decode, "prefill": self.prefill, "prefill_in_halves": self.overlap}
        return chosen | times | {"links_age_s": self.links_age_s}


def choose(
    groups: dict[str, Networked], links: LinkTable, decode_values: int, prefill_values: int, work: Work
) -> Choice:
    """Return the fastest algorithms for decode and prefill sums, the same on all nodes.

    Every node calls this function and times sums. The master sends its times to all nodes, which decide by the master's
    times.

    Args:
        groups: a group for each algorithm, by the algorithm's name, all over the same connections.
        links: the measured links, from which times are predicted.
        decode_values: the number of values in a decode sum.
        prefill_values: the number of values in a prefill sum.
        work: what a node computes between two sums of prefill. It matters because algorithms differ in how much CPU
            time they leave to it. If it takes longer than `_WORK_S`, sums are timed without it, so that the start is
            not delayed.
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
    """Return True if the measured times of decode sums show that the links are no longer as `predicted` assumes.

    Times are in seconds. The links have changed only if all timed algorithms are much slower than predicted, or all
    much faster, because other load on the machines delays only some algorithms.
    """
    timed = [(predicted[name][0], row[0]) for name, row in measured.items() if row[0] > 0]
    slower = [took > _ODD * said and took - said > _ODD_S for said, took in timed]
    faster = [said > _ODD * took and said - took > _ODD_S for said, took in timed]
    return bool(timed) and (all(slower) or all(faster))


def _time_columns(
    groups: dict[str, Networked], predicted: dict[str, list[float]], sizes: Sequence[int], work: Work
) -> F32:
    """Time the algorithms that may be the fastest for each size.

    Return this node's seconds, float32 `[algorithms, sizes]`; 0 stands for algorithms that were not timed.

    Args:
        groups: a group for each algorithm, by the algorithm's name.
        predicted: the predicted seconds of each algorithm, by size.
        sizes: the numbers of values in a decode sum, in a prefill sum, and in half of a prefill sum.
        work: what a node computes between two sums of prefill.
    """
    names = list(groups)
    pause = _seconds_of(work, groups[names[0]])
    if not 0 <= pause <= _WORK_S:  # also if it is NaN, which another node may have sent
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
    """Return the wire format and the transport that all `groups` share."""
    first = next(iter(groups.values()))
    return first.wire, first.transport


def _times(names: list[str], rows: Sequence[Sequence[float]]) -> Times:
    return {name: (row[0], row[1], row[2]) for name, row in zip(names, rows, strict=True)}


def _time(
    groups: dict[str, Networked], likely: Sequence[str], once: float, row: Row, values: F32, work: Work
) -> dict[str, float]:
    """Time real sums of `values` values by each of the `likely` algorithms. Return seconds by algorithm.

    `once` is the predicted time of one sum by each of the algorithms. Each pass times several sums in a row per
    algorithm. The first is not counted, because nodes may begin it at different times. The fastest pass of each
    algorithm counts, because other load on the machines only adds time.
    """
    passes = _PASSES[once * _PASSES[1] * (1 + _SUMS[0]) <= _BUDGET_S]
    count = int(min(max(_BUDGET_S / once / passes - 1, _SUMS[0]), _SUMS[1]))
    rows = [[row(groups[name], values, count, work) for name in likely] for _ in range(passes)]
    return {name: min(seconds) for name, seconds in zip(likely, zip(*rows, strict=True), strict=True)}


def _seconds_of(work: Work, group: Networked) -> float:
    """Return the seconds of `work` on the slowest node, estimated from the time of a quarter of `work`.

    Every node must call this, because the nodes exchange their times by a sum. The result is equal on all nodes.
    """
    seconds = np.zeros(group.size, np.float32)
    work(_PROBE)  # warms up caches
    started = perf_counter()
    work(_PROBE)
    seconds[group.rank] = _PROBE * (perf_counter() - started)
    return float(group.allreduce(seconds).max())


def _row(group: Networked, values: F32, count: int, work: Work) -> float:
    """Return the mean seconds of `count` sums in a row. One more sum before them is not timed."""
    group.allreduce(values)
    started = perf_counter()
    for _ in range(count):
        work(1)
        group.allreduce(values)
    return (perf_counter() - started) / count


def _row_of_halves(group: Networked, half: F32, count: int, work: Work) -> float:
    """Return the mean seconds of `count` sums in a row, each in two halves.

    While a node works on one half, the sum of the other half is under way.
    """
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
    """Return the names of the algorithms that `choose` considers."""
    return tuple(PREDICTIONS)
