"""What computing and moving neurons take, fitted from what was measured, and again when it drifts.

Each of three is a line, seconds = t0 + t n: n neurons on the accelerator, on the CPU, and over the link (t0, t_gpu,
t_cpu and t_trans of DynamicInfer). The slope is the median of the slopes between any two samples (Theil, 1950; Sen,
1968), which a few interrupted calls do not move. Drift is found by cumulative sums of what the line did not foretell,
upwards and downwards (CUSUM; Page, "Continuous inspection schemes", Biometrika 1954); then the line is fitted to new
samples alone.

A process that takes the CPU does not make each short call longer: it stops a few of them for a whole slice of its own.
So calls are pooled until they should take a few slices together, those of about as many neurons with each other, and
the mean of a pool is one sample. Long calls are samples by themselves.
"""

from collections import deque
from dataclasses import dataclass
from math import log

import numpy as np

FIRST = 12  # samples of the first fit
KEPT = 32  # the latest, which a fit is made of
ALLOWED = 0.75  # deviations that are noise: half of the smallest drift to be found, Page's k
ALARM = 9.0  # deviations at which the sum says that it drifted, Page's h
_CLIPPED = 3.0  # deviations, the most that one sample counts: whoever was interrupted once has not drifted
_LEAST_NOISE = 0.1  # of log(measured / foretold): less is not known of so few samples
_SPREAD = 0.25  # of the mean number of neurons, between two samples: with less a slope cannot be told from noise
POOLED = 5e-3  # seconds that the calls of a sample should take at least: a few slices of a scheduler
POOLED_CALLS = 16  # that a sample has at most: of shorter ones few are ever interrupted
_MAD = 1.4826  # deviations in a median deviation, where noise is normal


@dataclass(frozen=True)
class LineCost:
    """`start` seconds, and `each` for every neuron."""

    start: float
    each: float

    def seconds(self, count: float) -> float:
        """Of so many neurons; none take none."""
        return self.start + self.each * count if count else 0.0

    def count(self, seconds: float) -> int:
        """How many neurons take that long."""
        return max(0, int((seconds - self.start) / self.each)) if self.each > 0 else 0


class DriftAlarm:
    """Two cumulative sums over log ratios of measured to foretold, in deviations of what is `noise`."""

    def __init__(self, noise: float = _LEAST_NOISE) -> None:
        self.up = self.down = 0.0
        self._noise = max(_LEAST_NOISE, noise)

    def note(self, measured: float, foretold: float) -> bool:
        """Whether the process is no longer as foretold; both are seconds, and more than nothing."""
        off = max(-_CLIPPED, min(_CLIPPED, log(measured / foretold) / self._noise))
        self.up, self.down = max(0.0, self.up + off - ALLOWED), max(0.0, self.down - off - ALLOWED)
        return max(self.up, self.down) > ALARM


class FittedCost:
    """One line. Not safe from several threads."""

    def __init__(self) -> None:
        self.line: LineCost | None = None  # None: too little was measured yet
        self.drifts = 0
        self._samples = deque[tuple[float, float]](maxlen=KEPT)
        self._noise, self._usual = _LEAST_NOISE, 0.0  # what is added, since few neurons tell little of a line
        self._alarm = DriftAlarm()
        self._fresh = 0  # samples since the last fit
        self._pools: dict[int, list[tuple[int, float]]] = {}  # by the binary logarithm of their neurons

    def note(self, count: int, seconds: float) -> bool:
        """So many neurons took so long in a call; whether that is the call which says that it drifted."""
        if count < 1 or seconds <= 0:
            return False
        if self.line is None:
            return self._take(count, seconds)
        pool = self._pools.setdefault(count.bit_length(), [])
        pool.append((count, seconds))
        if len(pool) < POOLED_CALLS and sum(self.line.seconds(each) for each, _ in pool) < POOLED:
            return False
        counts, times = zip(*pool, strict=True)
        pool.clear()
        return self._take(sum(counts) / len(counts), sum(times) / len(times))

    def _take(self, count: float, seconds: float) -> bool:
        """A sample; whether it drifted."""
        drifted = self.line is not None and self._alarm.note(
            self._usual + seconds, self._usual + self.line.seconds(count)
        )
        if drifted:
            self.drifts += 1
            self._samples = deque(list(self._samples)[-2:], maxlen=KEPT)  # those that came after
            self._fresh, self._alarm = len(self._samples), DriftAlarm(self._noise)
        self._samples.append((count, seconds))
        self._fresh += 1
        early = self.line is None or len(self._samples) < FIRST
        if drifted or self._fresh >= (FIRST if early else KEPT):
            self._fit()
        return drifted

    def _fit(self) -> None:
        counts, seconds = np.array(self._samples, np.float64).T
        line = self.line = _line(counts, seconds, self.line)
        self._usual = 0.5 * float(np.median(seconds))
        off = np.log((self._usual + seconds) / (self._usual + line.start + line.each * counts))
        noise, self._fresh = _MAD * float(np.median(np.abs(off - np.median(off)))), 0
        self._noise = noise if len(off) >= FIRST else max(noise, self._noise)  # few samples may agree by chance
        self._alarm = DriftAlarm(self._noise)


def _line(counts: np.ndarray, seconds: np.ndarray, before: LineCost | None) -> LineCost:
    """Through the samples; where they are all alike what it took before they began is kept."""
    later, earlier = np.triu_indices(len(counts), 1)
    apart = np.abs(counts[later] - counts[earlier]) > _SPREAD * counts.mean()
    middle, typical = float(np.median(counts)), _midmean(seconds)
    if apart.sum() >= FIRST:
        slopes = (seconds[later] - seconds[earlier])[apart] / (counts[later] - counts[earlier])[apart]
        each = min(max(0.0, float(np.median(slopes))), typical / middle)
    else:
        each = max(typical - (before.start if before else 0.0), 0.1 * typical) / middle
    return LineCost(max(0.0, _midmean(seconds - each * counts)), max(each, 1e-12))


def _midmean(values: np.ndarray) -> float:
    """The mean of the middle half: where some samples are interrupted and others are not, it lies between them."""
    cut = len(values) // 4
    return float(np.mean(np.sort(values)[cut : len(values) - cut]))


class NeuronCosts:
    """The three lines of one node, over all of its layers: they differ in nothing that takes time.

    Attributes:
        there, here, moves: computing on the accelerator, on the CPU; copies to the accelerator.
    """

    def __init__(self) -> None:
        self.there, self.here, self.moves = FittedCost(), FittedCost(), FittedCost()

    @property
    def drifts(self) -> int:
        """How often anything was fitted again because it drifted."""
        return sum(cost.drifts for cost in (self.there, self.here, self.moves))
