"""The best way to place a node's work: the fastest for a whole request among all that fit, by bound and by timeline.

PIPO's equation 1 asks three questions in a row: does everything fit on the GPU, does it fit into RAM, and is there room
for preloading? This module compares more: any part may be anywhere, each phase may be computed on either device, and
the predicted time decides. A *residence* says where each segment is stored. Each residence has a lower bound in closed
form. Residences are simulated in the order of their bounds until the best simulated time is at most the next
bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from scheduler.model.offload.candidates import WAYS, Residences
from scheduler.model.offload.dealing import dealt_problems, to_be_dealt
from scheduler.model.offload.fitting import all_residences, fit_together, possible, refusal
from scheduler.model.offload.problem import I64, Problem
from scheduler.model.offload.tasks import F64, Candidates, Mask, bound
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import REQUEST_PHASES, KvTier, Offload, Pipeline, RequestPhase, kv_pages
from tpi.errors import PlanError

_AT_ONCE = 24  # residences that are simulated together
_NO_WORSE = 1.0001  # ways that take up to so many times the best time are simulated: times are compared to five digits
_STEPS = 2  # steps that are simulated


@dataclass(frozen=True)
class OffloadChoice:
    """The fastest configuration found, with the seconds of all prompts and of all answers of the request.

    `compared` counts configurations; `least` has the least lower bound for each place of keys and values
    and each pipeline, in seconds.
    """

    offload: Offload
    prompt_seconds: float
    decode_seconds: float
    compared: int  # number of residences compared, each in every way of computing it
    least: dict[tuple[KvTier, Pipeline], float]  # lower bound of seconds for each place of the pages and pipeline

    @property
    def seconds(self) -> float:
        """Seconds of the whole request."""
        return self.prompt_seconds + self.decode_seconds


def choose(problem: Problem) -> OffloadChoice:
    """Return the fastest configuration that fits and keeps to `problem.limits`.

    With several accelerators, compare all ways to divide segments among them (`dealt_problems`).

    Raises:
        PlanError: if no configuration does; the message names the smallest setting with which one would.
    """
    best: _Found | None = None
    for dealt in dealt_problems(problem) if to_be_dealt(problem) else [problem]:
        best = _choose(dealt, best[0] if best else (np.inf, 0)) or best
    if best is None:
        raise PlanError(refusal(problem))
    return best[1]


_Rank = tuple[float, int]
"""Seconds to five digits, then minus the resident bytes on the accelerators: of equal times, the most resident wins."""
_Found = tuple[_Rank, OffloadChoice]


def _choose(problem: Problem, within: _Rank) -> _Found | None:
    """Return the best configuration of `problem` and its rank; None if no configuration's rank is below `within`."""
    groups = [_Group(problem, of) for of in all_residences(problem)]
    ranked = sorted(
        (group.rank(column, seconds), number, column)
        for number, group in enumerate(groups)
        for column, seconds in enumerate(group.least.tolist())
        if seconds < np.inf
    )
    best, simulated = (within, -1, -1), 0
    while simulated < len(ranked) and ranked[simulated][0] < best[0]:
        batch = ranked[simulated : simulated + _AT_ONCE]
        simulated += len(batch)
        for number, group in enumerate(groups):
            columns = sorted(column for _, of, column in batch if of == number)
            timed = group.simulate(columns, best[0][0] * _NO_WORSE)
            best = min([best, *((group.rank(column, seconds), number, column) for seconds, column in timed)])
    if best[1] < 0:
        return None
    least = {group.kind: float(group.least.min()) for group in groups}
    return best[0], groups[best[1]].choice(best[2], len(ranked), least)


class _Group:
    def __init__(self, problem: Problem, of: Residences) -> None:
        self._of, self._blocks = of, problem.work.blocks
        self._steps = {phase: problem.step(phase) for phase in REQUEST_PHASES}
        self._tasks = {phase: problem.tasks(size) for phase, (size, _) in self._steps.items()}
        self._least = {phase: self._bounds(problem, phase) for phase in REQUEST_PHASES}
        self._problem = problem
        self._together: dict[tuple[int, int], Mask] = {}
        self._found: dict[int, tuple[tuple[float, int], tuple[float, int]]] = {}

    def rank(self, column: int, seconds: float) -> _Rank:
        """Return the sort key of the residence in `column` whose request takes `seconds`.

        Faster requests come first; of equally fast ones, the one with more bytes resident on accelerators.
        """
        return _digits(seconds, 5), -int(self._kept[column])

    @cached_property
    def _kept(self) -> I64:
        pages = kv_pages(self._problem.work, self._problem.request) if self._of.kv == "gpu" else 0
        found: I64 = np.where(self._of.gpu, self._problem.sizes, 0).sum(axis=0) + pages
        return found

    @cached_property
    def least(self) -> F64:
        """Lower bounds of the request's seconds, `[candidates]`; infinite for residences that do not fit."""
        total: F64 = sum((self._least[phase].min(axis=0) for phase in REQUEST_PHASES), np.zeros(self._of.count))
        return total

    def simulate(self, columns: Sequence[int], best: float) -> list[tuple[float, int]]:
        """Simulate the residences in `columns`; return the seconds of the whole request and the column of each.

        A residence has several ways to compute. A way whose lower bound is not below `best` seconds is not simulated,
        and a residence is left out of the result if all of its ways are.
        """
        times: dict[RequestPhase, dict[int, list[tuple[float, int]]]] = {}
        for phase, other_phase in (REQUEST_PHASES, REQUEST_PHASES[::-1]):
            other = self._least[other_phase].min(axis=0)
            ways = [
                (way, column)
                for column in columns
                for way in range(WAYS)
                if self._least[phase][way, column] + other[column] < best
            ]
            columns = sorted({column for _, column in ways})
            times[phase] = self._times(ways, phase)
        prompt, decode = (times[phase] for phase in REQUEST_PHASES)
        self._found |= {
            column: pair for column in columns if (pair := self._pair(column, prompt[column], decode[column]))
        }
        pairs = ((self._found[column], column) for column in columns if column in self._found)
        return [(first[0] + then[0], column) for (first, then), column in pairs]

    def _pair(
        self, column: int, prompt: Sequence[tuple[float, int]], decode: Sequence[tuple[float, int]]
    ) -> tuple[tuple[float, int], tuple[float, int]] | None:
        """Return the fastest way for prompts and the fastest for decoding that fit into memory together.

        Return None if no two do.
        """
        for first, then in sorted(product(prompt, decode), key=lambda pair: (pair[0][0] + pair[1][0], pair)):
            ways = first[1], then[1]
            if ways not in self._together:
                self._together[ways] = fit_together(self._problem, self._of, *ways)
            if self._together[ways][column]:
                return first, then
        return None

    @property
    def kind(self) -> tuple[KvTier, Pipeline]:
        return self._of.kv, self._of.pipeline

    def choice(self, column: int, compared: int, least: dict[tuple[KvTier, Pipeline], float]) -> OffloadChoice:
        (prompt, first), (decode, then) = self._found[column]
        offload = self._of.offload(column, first, then)
        if self._problem.head_there and offload.on_card:
            offload = replace(offload, head="gpu")
        return OffloadChoice(offload, prompt, decode, compared, least)

    def _times(self, ways: Sequence[tuple[int, int]], phase: RequestPhase) -> dict[int, list[tuple[float, int]]]:
        """Return the simulated seconds and number of each of `ways`, grouped by column, for one phase of the
        request.
        """
        if not ways:
            return {}
        parts = [self._of.candidates(way, [column for of, column in ways if of == way]) for way in range(WAYS)]
        count, tasks = self._steps[phase][1], self._tasks[phase]
        steps = min(count, _STEPS)
        times = simulate_steps(tasks, Candidates.joined(parts), self._blocks, self._of.pipeline, steps).steps.sum(
            axis=0
        )
        seconds = dict(zip(sorted(ways), (times * (count / steps)).tolist(), strict=True))
        found: dict[int, list[tuple[float, int]]] = {}
        for (way, column), value in seconds.items():
            found.setdefault(column, []).append((_digits(value, 6), way))
        return found

    def _bounds(self, problem: Problem, phase: RequestPhase) -> F64:
        """Return the lower bounds of a phase's seconds, `[WAYS, candidates]`; infinite for ways that are impossible."""
        found = np.full((WAYS, self._of.count), np.inf)
        for way in range(WAYS):
            fits = possible(problem, self._of, way, phase)
            if fits.any():
                least = bound(self._tasks[phase], self._of.candidates(way), self._blocks, self._of.pipeline)
                found[way] = np.where(fits, self._steps[phase][1] * least, np.inf)
        return found


def _digits(seconds: float, digits: int) -> float:
    """Return a time rounded to `digits` significant digits, so that nearly equal ways to compute count as equal.

    Of equal ways, the search takes the first, which moves the fewest bytes.
    """
    return float(f"{seconds:.{digits}g}")
