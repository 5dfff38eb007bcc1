"""A run compared with its forecast: when the forecast is doubted, and when the steps say too little."""

from collections.abc import Sequence

import pytest

from scheduler.model.offload.forecast import step_seconds
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import StepSize, Workload
from tests.support.devices.offload_cases import MACHINE, layers, offload
from worker.measure.watch import StepWatch

PROBLEM = Problem(layers(2, kv_token=8), MACHINE, Workload(8, 4, 1, 64), Needs(token=1))
CHOSEN = offload(["ram", "gpu", "ram", "gpu"])
PREDICTED = step_seconds(PROBLEM, CHOSEN, StepSize(1, 1, 10))  # of a token with nine before it


def doubts(seconds: Sequence[float], tokens: int = 1) -> bool:
    """Return True if steps of these durations make the run doubt its forecast."""
    found: list[bool] = []
    watch = StepWatch(PROBLEM, CHOSEN, lambda: found.append(True))
    for each in seconds:
        watch.note(tokens, 10, each)
    watch.close()
    return bool(found)


@pytest.mark.parametrize(("times", "doubted"), [(1.0, False), (1.8, False), (0.6, False), (2.5, True), (0.3, True)])
def test_much_slower_or_faster_than_predicted_is_doubted(times: float, doubted: bool) -> None:
    assert doubts([times * PREDICTED] * 12) is doubted


def test_a_few_slow_steps_among_many_are_none() -> None:
    assert not doubts([9 * PREDICTED] * 2 + [PREDICTED] * 10 + [9 * PREDICTED] * 3)


def test_a_short_run_and_steps_of_a_prompt_say_nothing() -> None:
    assert not doubts([9 * PREDICTED] * 9)
    assert not doubts([9 * PREDICTED] * 20, tokens=2)
