"""Time to compute and to move neurons, fitted to measurements and fitted again when it drifts.

Three costs are lines, seconds = t0 + t n: n neurons on the accelerator, on the CPU, and over the link (t0, t_gpu,
t_cpu and t_trans of DynamicInfer). The slope is the median of the slopes between any two samples (Theil, 1950; Sen,
1968), so a few interrupted calls do not change it. Two cumulative sums of the line's errors, upwards and downwards,
detect drift (CUSUM; Page, "Continuous inspection schemes", Biometrika 1954). After a drift the line is fitted to new
samples alone.

A process that competes for the CPU interrupts a few short calls for a whole time slice and leaves the others alone.
So calls of similar neuron counts are pooled until they should take a few slices together. The mean of a pool is one
sample. Long calls are samples by themselves.
"""

from collections import deque
from dataclasses import dataclass
from math import log

import numpy as np

FIRST = 12  # samples of the first fit
KEPT = 32  # latest samples used by later fits
ALLOWED = 0.75  # Page's k, in deviations: half of the smallest drift to detect; less is noise
ALARM = 9.0  # Page's h, in deviations: a sum above it means drift
_CLIPPED = 3.0  # largest deviation that one sample adds: one interrupted call is not a drift
_LEAST_NOISE = 0.1  # smallest assumed deviation of log(measured / expected): few samples cannot show less
_SPREAD = 0.25  # smallest distance of two samples that give a slope, as a share of the mean number of neurons
POOLED = 5e-3  # shortest expected time of a sample's calls, in seconds: a few time slices of the operating system
POOLED_CALLS = 16  # most calls in a sample: of shorter calls few are ever interrupted
_MAD = 1.4826  # standard deviations in a median absolute deviation, for normal noise


@dataclass(frozen=True)
class LineCost:
    """A cost of `start` seconds plus `each` seconds for every neuron."""

    start: float
    each: float

    def seconds(self, count: float) -> float:
        """Return the seconds that `count` neurons take; 0 if `count` is 0."""
        return self.start + self.each * count if count else 0.0

    def count(self, seconds: float) -> int:
        """Return the number of neurons that fit into `seconds`; 0 if a neuron has no cost."""
        return max(0, int((seconds - self.start) / self.each)) if self.each > 0 else 0


class DriftAlarm:
    """A drift test (CUSUM): cumulative sums of log(measured / expected), in units of the deviation `noise`."""

    def __init__(self, noise: float = _LEAST_NOISE) -> None:
        self.up = self.down = 0.0
        self._noise = max(_LEAST_NOISE, noise)

    def add(self, measured: float, expected: float) -> bool:
        """Add one sample, both values in seconds above 0; return True if the times have drifted."""
        off = max(-_CLIPPED, min(_CLIPPED, log(measured / expected) / self._noise))
        self.up, self.down = max(0.0, self.up + off - ALLOWED), max(0.0, self.down - off - ALLOWED)
        return max(self.up, self.down) > ALARM


class FittedCost:
    """The cost of computing or copying neurons, as a line that is fitted again when it drifts.

    Only one thread at a time may use it.
    """

    def __init__(self) -> None:
        self.line: LineCost | None = None  # None until the first fit
        self.drifts = 0
        self._samples = deque[tuple[float, float]](maxlen=KEPT)
        self._noise, self._usual = _LEAST_NOISE, 0.0  # `_usual` damps ratios of very short samples
        self._alarm = DriftAlarm()
        self._fresh = 0  # samples since the last fit
        self._pools: dict[int, list[tuple[int, float]]] = {}  # by the bit length of the neuron count

    def add(self, count: int, seconds: float) -> bool:
        """Add a call that computed `count` neurons in `seconds`; return True if it reveals a drift."""
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
        """Add a sample; return True if it reveals a drift.

        The line is fitted again after a drift, or after enough new samples.
        """
        drifted = self.line is not None and self._alarm.add(
            self._usual + seconds, self._usual + self.line.seconds(count)
        )
        if drifted:
            self.drifts += 1
            self._samples = deque(list(self._samples)[-2:], maxlen=KEPT)  # taken after the drift began
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
    """Return the line through samples of `counts` neurons that took `seconds`.

    If the counts are too similar to determine a slope, the line has the `start` of `before`, or 0 if `before` is None.
    """
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
    """Return the mean of the middle half of `values`, which a few interrupted samples hardly change."""
    cut = len(values) // 4
    return float(np.mean(np.sort(values)[cut : len(values) - cut]))


class NeuronCosts:
    """The costs of one node's neurons. All layers share them, because their neurons have the same size.

    Attributes:
        accelerator: computing on the accelerator.
        cpu: computing on the CPU.
        moves: copies to the accelerator.
    """

    def __init__(self) -> None:
        self.accelerator, self.cpu, self.moves = FittedCost(), FittedCost(), FittedCost()

    @property
    def drifts(self) -> int:
        """Number of drifts found in the three costs."""
        return sum(cost.drifts for cost in (self.accelerator, self.cpu, self.moves))
