"""Costs fitted to drawn measurements, and again after a drift; one long call is no drift, many are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.neurons.costs import FIRST, KEPT, POOLED_CALLS, DriftAlarm, FittedCost

START, EACH = 1e-4, 2e-5  # seconds of calls that are long enough to be samples by themselves
SLICE = 3e-3  # seconds that another process computes before it is this one's turn again


def noted(cost: FittedCost, random: np.random.Generator, start: float, each: float, samples: int) -> int:
    """Record measurements of lines with 10% noise; return the number of drifts."""
    drifts = 0
    for _ in range(samples):
        count = int(random.integers(50, 800))
        drifts += cost.add(count, (start + each * count) * float(random.uniform(0.95, 1.1)))
    return drifts


@given(seed=st.integers(0, 1 << 30), start=st.sampled_from([0.0, 1e-5, 1e-4]), each=st.sampled_from([1e-7, 1e-6]))
@settings(max_examples=40, deadline=None)
def test_a_line_is_fitted_early_and_does_not_drift(seed: int, start: float, each: float) -> None:
    cost, random = FittedCost(), np.random.default_rng(seed)
    assert noted(cost, random, start, each, FIRST) == 0
    assert cost.line is not None
    assert cost.line.seconds(400) == pytest.approx(start + 400 * each, rel=0.15)
    assert noted(cost, random, start, each, 300) <= 1


@pytest.mark.parametrize("factor", [4.0, 2.0, 1.6, 0.5])
def test_a_drift_is_seen_soon_and_fitted_again(factor: float) -> None:
    cost, random = FittedCost(), np.random.default_rng(5)
    noted(cost, random, START, EACH, 100)
    assert noted(cost, random, START * factor, EACH * factor, 32) >= 1
    noted(cost, random, START * factor, EACH * factor, 2 * KEPT)
    assert cost.line is not None
    assert cost.line.seconds(400) == pytest.approx(factor * (START + 400 * EACH), rel=0.15)
    assert cost.drifts <= 2


def test_one_interrupted_call_hardly_moves_the_line() -> None:
    cost, random = FittedCost(), np.random.default_rng(6)
    noted(cost, random, START, EACH, 60)
    assert not cost.add(400, 0.5)
    noted(cost, random, START, EACH, 2 * KEPT)
    assert cost.line is not None
    assert cost.line.seconds(400) == pytest.approx(START + 400 * EACH, rel=0.15)


def interrupted(random: np.random.Generator, cost: FittedCost, calls: int, share: float) -> int:
    """Record short calls, of which the share `share` is interrupted for one time slice; return the number of drifts."""
    drifts = 0
    for _ in range(calls):
        count = int(random.integers(20, 80))
        stopped = SLICE if random.random() < share else 0.0
        drifts += cost.add(count, 1e-5 + 1e-5 * count + stopped)
    return drifts


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_calls_that_are_interrupted_now_and_then_cost_their_mean(share: float) -> None:
    """Most calls take as long as before, so a median would never change."""
    cost, random = FittedCost(), np.random.default_rng(8)
    assert interrupted(random, cost, 20 * POOLED_CALLS, 0.0) == 0
    assert interrupted(random, cost, 30 * POOLED_CALLS, share) >= 1
    interrupted(random, cost, 2 * KEPT * POOLED_CALLS, share)
    assert cost.line is not None
    assert cost.line.seconds(50) == pytest.approx(51e-5 + share * SLICE, rel=0.3)
    assert interrupted(random, cost, 30 * POOLED_CALLS, 0.0) >= 1


def test_equal_samples_still_give_a_cost_for_each_neuron() -> None:
    cost = FittedCost()
    for _ in range(FIRST):
        cost.add(64, 64e-6)
    assert cost.line is not None
    assert cost.line.seconds(64) == pytest.approx(64e-6)
    assert cost.line.count(32e-6) == 32


def test_nothing_is_learnt_of_no_neurons() -> None:
    cost = FittedCost()
    for _ in range(50):
        assert not cost.add(0, 1.0)
    assert cost.line is None


def test_the_noisier_it_is_the_more_it_takes_to_be_a_drift() -> None:
    random = np.random.default_rng(7)
    ratios = np.exp(random.normal(0, 0.4, 200))
    calm, noisy = DriftAlarm(0.1), DriftAlarm(0.4)
    assert any(calm.add(ratio, 1.0) for ratio in ratios.tolist())
    assert not any(noisy.add(ratio, 1.0) for ratio in ratios.tolist())


def test_the_sums_forget_what_evens_out() -> None:
    alarm = DriftAlarm()
    assert not any(alarm.add(1.1 if at % 2 else 0.9, 1.0) for at in range(1000))
    assert any(alarm.add(1.5, 1.0) for _ in range(10))
