"""Thresholds of their own for accelerator and CPU, by their load, within the error of the one threshold.

A predictor's score z stands for the probability p = 1 / (1 + exp(-z)) that a neuron is active (DynamicInfer, its loss).
What a threshold leaves out is expected to be the sum of p below it: that is its error. Lowering the accelerator's
threshold brings some of it back; raising the CPU's may then leave out as much, and no more:

    Err(theta_g, theta_c) <= Err(theta)     while     max(t_gpu N_gpu, t_cpu N_cpu + t_sync)     becomes less

(DynamicInfer, design 3.) Greedy: what is added has the highest scores on the one side, what is left out the lowest on
the other. It works either way, whichever side is the slower.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.neurons.costs import LineCost
from scheduler.neurons.slots import I32, Marks

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


_FAR = 8.0  # below the threshold a neuron's chance is too small to bring anything back


@dataclass(frozen=True, eq=False)
class NeuronShares:
    """What each side computes, int32 in order, and the scores from which on they do; `lost` is the error's change."""

    there: I32
    here: I32
    threshold_there: float
    threshold_here: float
    lost: float = 0.0  # sum of p left out, less what was brought back: never above 0


def plain_shares(scores: F32, threshold: float, there: Marks) -> NeuronShares:
    """One threshold for both: `scores` `[neurons]`, `there` says which lie on the accelerator."""
    active = scores >= np.float32(threshold)
    return NeuronShares(_numbers(active & there), _numbers(active & ~there), threshold, threshold)


def balanced_shares(scores: F32, threshold: float, there: Marks, accelerator: LineCost, cpu: LineCost) -> NeuronShares:
    """The two thresholds that end the sooner; the one threshold for both where no other pair does."""
    before = plain_shares(scores, threshold, there)
    times = accelerator.seconds(len(before.there)), cpu.seconds(len(before.here))
    if times[1] > times[0]:
        gains, drops = _exchange(scores, threshold, there, ~there, accelerator, cpu)
        added, left_out = before.there, before.here
    else:
        gains, drops = _exchange(scores, threshold, ~there, there, cpu, accelerator)
        added, left_out = before.here, before.there
    if not len(drops):
        return before
    more = np.sort(np.concatenate([added, gains])).astype(np.int32)
    kept = np.zeros(len(scores), np.bool_)
    kept[left_out], kept[drops] = True, False
    fewer = _numbers(kept)
    lower = float(scores[gains].min())
    higher = float(scores[fewer].min()) if len(fewer) else float("inf")
    lost = float(_chances(scores[drops]).sum() - _chances(scores[gains]).sum())
    if times[1] > times[0]:
        return NeuronShares(more, fewer, lower, higher, lost)
    return NeuronShares(fewer, more, higher, lower, lost)


def _exchange(
    scores: F32, threshold: float, fast: Marks, slow: Marks, quick: LineCost, tardy: LineCost
) -> tuple[I32, I32]:
    """What the faster side adds, and what the slower leaves out, so that both end the soonest."""
    active = scores >= np.float32(threshold)
    spare = _numbers(fast & ~active & (scores > np.float32(threshold - _FAR)))
    load = _numbers(slow & active)
    spare, load = spare[np.argsort(-scores[spare], kind="stable")], load[np.argsort(scores[load], kind="stable")]
    back, lost = np.cumsum(_chances(scores[spare])), np.cumsum(_chances(scores[load]))
    needed = np.searchsorted(back, lost, side="left") + 1  # how many bring back what the first n leave out
    possible = needed <= len(spare)
    drops = np.arange(1, len(load) + 1)[possible]
    adds = needed[possible]
    if not len(drops):
        return spare[:0], load[:0]
    base = int((fast & active).sum())
    quick_seconds = quick.start + quick.each * (base + adds)
    tardy_seconds = np.where(drops < len(load), tardy.start + tardy.each * (len(load) - drops), 0.0)
    ends = np.maximum(quick_seconds, tardy_seconds)
    best = int(np.argmin(ends))
    now = max(quick.seconds(base), tardy.seconds(len(load)))
    if ends[best] >= now:
        return spare[:0], load[:0]
    return spare[: adds[best]], load[: drops[best]]


def _chances(scores: F32) -> F64:
    """The probability that each is active."""
    found: F64 = 0.5 * (1.0 + np.tanh(0.5 * scores.astype(np.float64)))
    return found


def _numbers(marks: Marks) -> I32:
    return np.flatnonzero(marks).astype(np.int32)
