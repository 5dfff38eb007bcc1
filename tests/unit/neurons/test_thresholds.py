"""Thresholds of accelerator and CPU: the error is at most that of one threshold, and the slower side ends sooner."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.neurons.costs import LineCost
from scheduler.neurons.thresholds import F32, NeuronShares, balanced_shares, plain_shares
from scheduler.slots.table import Marks
from tests.support.devices.neurons import FAST, SLOW


def ends(shares: NeuronShares, accelerator: LineCost, cpu: LineCost) -> float:
    return max(accelerator.seconds(len(shares.on_accelerator)), cpu.seconds(len(shares.on_cpu)))


def left_out(shares: NeuronShares, scores: F32) -> float:
    """Return the expected number of active neurons that are not computed."""
    done = np.zeros(len(scores), bool)
    done[shares.on_accelerator] = done[shares.on_cpu] = True
    return float((1 / (1 + np.exp(-scores[~done].astype(float)))).sum())


def best_by_hand(scores: F32, threshold: float, there: Marks) -> float:
    """Return the best of all pairs of counts: the highest scores of each side, within the error of one threshold."""
    allowed = left_out(plain_shares(scores, threshold, there), scores) + 1e-9
    chance = 1 / (1 + np.exp(-scores.astype(float)))
    sides = [np.sort(chance[side])[::-1] for side in (there, ~there)]
    best = np.inf
    for one in range(len(sides[0]) + 1):
        for other in range(len(sides[1]) + 1):
            if sides[0][one:].sum() + sides[1][other:].sum() <= allowed:
                best = min(best, max(FAST.seconds(one), SLOW.seconds(other)))
    return best


@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 14), threshold=st.floats(-2, 2), share=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_two_thresholds_are_within_the_error_and_no_slower(
    seed: int, count: int, threshold: float, share: float
) -> None:
    random = np.random.default_rng(seed)
    scores, there = random.normal(0, 2, count).astype(np.float32), random.random(count) < share
    plain = plain_shares(scores, threshold, there)
    shares = balanced_shares(scores, threshold, there, FAST, SLOW)
    assert left_out(shares, scores) <= left_out(plain, scores) + 1e-6
    assert ends(shares, FAST, SLOW) <= ends(plain, FAST, SLOW)
    assert ends(shares, FAST, SLOW) >= best_by_hand(scores, threshold, there) - 1e-9
    assert there[shares.on_accelerator].all()
    assert not there[shares.on_cpu].any()
    assert (scores[shares.on_accelerator] >= np.float32(shares.accelerator_threshold)).all()
    assert (scores[shares.on_cpu] >= np.float32(shares.cpu_threshold)).all()


def test_a_slow_cpu_gets_a_higher_threshold_than_the_accelerator() -> None:
    scores = np.linspace(-3, 3, 200, dtype=np.float32)
    there = np.arange(200) % 2 == 0
    plain, shares = plain_shares(scores, 0.0, there), balanced_shares(scores, 0.0, there, FAST, SLOW)
    assert shares.accelerator_threshold < 0 < shares.cpu_threshold
    assert len(shares.on_cpu) < 0.8 * len(plain.on_cpu)
    assert len(shares.on_accelerator) > len(plain.on_accelerator)


def test_a_slow_accelerator_hands_neurons_to_the_cpu() -> None:
    scores = np.linspace(-3, 3, 200, dtype=np.float32)
    shares = balanced_shares(scores, 0.0, np.arange(200) % 2 == 0, SLOW, FAST)
    assert shares.cpu_threshold < 0 < shares.accelerator_threshold


@pytest.mark.parametrize(
    "scores", [np.full(40, 1e9), np.where(np.arange(40) % 3 == 0, 1e4, -1e4)], ids=["all", "exact"]
)
def test_what_is_certain_is_never_left_out(scores: np.ndarray) -> None:
    scores, there = scores.astype(np.float32), np.arange(40) < 10
    shares = balanced_shares(scores, 0.0, there, FAST, SLOW)
    assert sorted([*shares.on_accelerator, *shares.on_cpu]) == np.flatnonzero(scores >= 0).tolist()
