"""A comparison of step times with the cost model's prediction: if they differ, this machine is measured again."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from scheduler.model.offload.forecast import step_seconds
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Offload, StepSize, TableWork
from worker.measure.remembered import contradicts

_WARM = 2  # first steps that do not count, since they load libraries and compile kernels
_LEAST = 8  # minimum of further steps for a comparison
_MOST = 512  # limit of recorded steps


class StepWatch:
    """A record of the steps of one token that a node computed, for comparison with the plan's prediction."""

    def __init__(self, problem: Problem, offload: Offload, doubt: Callable[[], None]) -> None:
        """Start a record.

        Args:
            problem: the input of the cost model.
            offload: the plan that the node runs, which the cost model chose for `problem`.
            doubt: called by `close` if the steps contradict the prediction for that plan.
        """
        work = replace(problem.work, head=TableWork())  # steps do not include the time of the head
        self._problem, self._offload, self._doubt = replace(problem, work=work), offload, doubt
        self._seen: list[tuple[int, float]] = []

    def note(self, tokens: int, context: int, seconds: float) -> None:
        """Record a step of `tokens` tokens that took `seconds` seconds without the waits for other nodes.

        Only steps of one token are recorded; `context` is the number of tokens of its sequence.
        """
        if tokens == 1 and len(self._seen) < _MOST:
            self._seen.append((context, seconds))

    @property
    def contradicted(self) -> bool:
        """True if the median step took more than twice, or less than half, the predicted time."""
        seen = self._seen[_WARM:]
        if len(seen) < _LEAST:
            return False
        step = StepSize(1, 1, median(context for context, _ in seen))
        return contradicts(step_seconds(self._problem, self._offload, step), median(seconds for _, seconds in seen))

    def close(self) -> None:
        """End the record, and call `doubt` if the steps contradict the prediction."""
        if self.contradicted:
            self._doubt()
