"""Whether tokens take as long as the cost model says of this machine's figures: if not, the figures are doubted."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from scheduler.model.offload.forecast import step_seconds
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Offload, StepSize, TableWork
from worker.measure.remembered import contradicts

_WARM = 2  # steps that load libraries and compile kernels
_LEAST = 8  # steps after them that say something
_MOST = 512  # that are kept


class StepWatch:
    """The steps of one token that a node computed: their seconds against those of its plan."""

    def __init__(self, problem: Problem, offload: Offload, doubt: Callable[[], None]) -> None:
        """`doubt` is called at the end if the two contradict each other."""
        work = replace(problem.work, head=TableWork())  # the head's time is not the steps'
        self._problem, self._offload, self._doubt = replace(problem, work=work), offload, doubt
        self._seen: list[tuple[int, float]] = []

    def note(self, tokens: int, context: int, seconds: float) -> None:
        """A step of so many tokens took so long, waits for other nodes left out; `context` are its sequence's."""
        if tokens == 1 and len(self._seen) < _MOST:
            self._seen.append((context, seconds))

    @property
    def contradicted(self) -> bool:
        """Whether the middle one of the steps took much more or much less than predicted."""
        seen = self._seen[_WARM:]
        if len(seen) < _LEAST:
            return False
        step = StepSize(1, 1, median(context for context, _ in seen))
        return contradicts(step_seconds(self._problem, self._offload, step), median(seconds for _, seconds in seen))

    def close(self) -> None:
        """The last step is over."""
        if self.contradicted:
            self._doubt()
