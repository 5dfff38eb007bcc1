"""All neurons on the CPU, or active ones on both sides: the faster way by measurements, which are repeated at times."""

from math import inf

import pytest

from scheduler.neurons.costs import LineCost
from worker.neurons.fallback import ASKED_AGAIN, DenseFallback

CPU, FAST, SLOW = LineCost(1.0, 1.0), LineCost(1.0, 0.1), LineCost(1.0, 4.0)
NEURONS = 100


@pytest.mark.parametrize(
    ("there", "here", "lines", "pays"),
    [
        (0, 60, None, True),
        (90, 60, None, True),  # of the accelerator nothing is known yet
        (0, 61, None, False),
        (90, 60, (FAST, CPU), True),
        (90, 61, (FAST, CPU), False),
        (15, 10, (SLOW, CPU), True),
        (16, 10, (SLOW, CPU), False),
    ],
)
def test_the_slower_side_is_compared_with_all_neurons_on_the_cpu(
    there: int, here: int, lines: tuple[LineCost, LineCost] | None, pays: bool
) -> None:
    fallback = DenseFallback(0.6)
    assert fallback.prefers_active(there, here, NEURONS, lines) is pays
    assert fallback.dense == (not pays)


def test_a_shared_cpu_is_as_slow_for_all_neurons() -> None:
    taken = LineCost(4.0, 4.0)
    assert DenseFallback(0.6).prefers_active(10, 60, NEURONS, (FAST, taken))
    assert DenseFallback(0.6).prefers_active(50, 10, NEURONS, (SLOW, taken))
    assert not DenseFallback(0.6).prefers_active(50, 10, NEURONS, (SLOW, CPU))


def test_both_sides_are_measured_again_after_a_while() -> None:
    fallback = DenseFallback(0.6)
    chosen = [fallback.prefers_active(90, 90, NEURONS, (SLOW, CPU)) for _ in range(3 * (ASKED_AGAIN + 1))]
    assert chosen == ([False] * ASKED_AGAIN + [True]) * 3


def test_without_a_limit_active_neurons_alone_are_computed() -> None:
    assert DenseFallback(inf).prefers_active(NEURONS, NEURONS, NEURONS, (SLOW, CPU))
    assert DenseFallback().prefers_active(NEURONS, NEURONS, NEURONS, None)


def test_each_size_of_steps_is_measured_once_when_it_comes() -> None:
    fallback, measured = DenseFallback(0.6), iter([0.9, 0.3])
    assert fallback.limit(1, lambda: next(measured)) == 0.6
    assert fallback.limit(20, lambda: next(measured)) == 0.9
    assert fallback.limit(32, lambda: next(measured)) == 0.9  # as 20
    assert fallback.limit(3, lambda: next(measured)) == 0.3
    assert fallback.prefers_active(0, 85, NEURONS, None, 20)
    assert not fallback.prefers_active(0, 85, NEURONS, None, 1)
    assert not fallback.prefers_active(0, 31, NEURONS, None, 4)


def test_computing_all_that_is_never_faster_is_not_measured() -> None:
    assert DenseFallback(inf).limit(20, lambda: 0.1) == inf
    late = DenseFallback()
    assert late.limit(20, lambda: 0.1) == inf  # not before it is known for one token
    late.learn(1, 0.5)
    assert late.known
    assert late.limit(20, lambda: 0.1) == 0.1


def test_a_union_that_did_not_pay_is_tried_again_later() -> None:
    fallback = DenseFallback(0.6)
    fallback.note(3, 20, False)
    fallback.note(3, 1, False)
    fallback.note(2, 20, True)
    assert fallback.should_predict(3, 1)
    assert fallback.should_predict(2, 20)
    asked = [fallback.should_predict(3, 30) for _ in range(ASKED_AGAIN + 2)]
    assert asked == [False] * ASKED_AGAIN + [True, True]
