"""Separate thresholds for accelerator and CPU that balance their load within the error of one common threshold.

A predictor's score z stands for the probability p = 1 / (1 + exp(-z)) that a neuron is active (DynamicInfer, its loss).
The error of a threshold is the sum of p over all neurons that it leaves out: those with lower scores. A lower threshold
of the accelerator reduces the error; the CPU's threshold may then rise until it adds as much error:

    Err(theta_g, theta_c) <= Err(theta)     while     max(t_gpu N_gpu, t_cpu N_cpu + t_sync)     becomes less

(DynamicInfer, design 3.) The choice is greedy: the side that would finish first adds the neurons with its highest
scores below the threshold, and the other side drops the neurons with its lowest. Either side can be the slower one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.neurons.costs import LineCost
from scheduler.slots.table import F64, I32, Marks

F32 = npt.NDArray[np.float32]


_FAR = 8.0  # scores this far below the threshold are not added: their probability is too small to matter


@dataclass(frozen=True, eq=False)
class NeuronShares:
    """The neurons that the accelerator and the CPU compute, int32 and ascending, and the thresholds of both.

    `lost` is the change of the expected error, compared with one threshold for both.
    """

    on_accelerator: I32
    on_cpu: I32
    accelerator_threshold: float
    cpu_threshold: float
    lost: float = 0.0  # sum of p dropped minus sum of p added: never above 0


def plain_shares(scores: F32, threshold: float, there: Marks) -> NeuronShares:
    """Divide the neurons whose score reaches `threshold` between the two sides by where they are.

    `scores` are the predictor's, `[neurons]`. `there` is True for neurons that are on the accelerator, `[neurons]`.
    """
    active = scores >= np.float32(threshold)
    return NeuronShares(_numbers(active & there), _numbers(active & ~there), threshold, threshold)


def balanced_shares(scores: F32, threshold: float, there: Marks, accelerator: LineCost, cpu: LineCost) -> NeuronShares:
    """Divide neurons by two thresholds, chosen so that the side that finishes last finishes as early as possible.

    If no two thresholds are faster than `threshold` on both sides, divide the neurons as `plain_shares` does.
    `accelerator` and `cpu` are the costs of computing neurons on each side. The other arguments are those of
    `plain_shares`.
    """
    before = plain_shares(scores, threshold, there)
    times = accelerator.seconds(len(before.on_accelerator)), cpu.seconds(len(before.on_cpu))
    if times[1] > times[0]:
        gains, drops = _exchange(scores, threshold, there, ~there, accelerator, cpu)
        added, left_out = before.on_accelerator, before.on_cpu
    else:
        gains, drops = _exchange(scores, threshold, ~there, there, cpu, accelerator)
        added, left_out = before.on_cpu, before.on_accelerator
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
    """Return the neurons that the faster side adds and those that the slower side drops, so that both finish sooner.

    Both are empty if nothing is gained. `fast` and `slow` mark the neurons of either side, `[neurons]`; `quick` and
    `tardy` are the costs of the two sides.
    """
    active = scores >= np.float32(threshold)
    spare = _numbers(fast & ~active & (scores > np.float32(threshold - _FAR)))
    load = _numbers(slow & active)
    spare, load = spare[np.argsort(-scores[spare], kind="stable")], load[np.argsort(scores[load], kind="stable")]
    back, lost = np.cumsum(_chances(scores[spare])), np.cumsum(_chances(scores[load]))
    needed = np.searchsorted(back, lost, side="left") + 1  # additions that make up for the first n drops
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
    """Return the probability that each neuron is active, from its predictor's score."""
    found: F64 = 0.5 * (1.0 + np.tanh(0.5 * scores.astype(np.float64)))
    return found


def _numbers(marks: Marks) -> I32:
    return np.flatnonzero(marks).astype(np.int32)
