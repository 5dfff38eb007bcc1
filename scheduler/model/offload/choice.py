"""The best way to place a node's work: the fastest for a whole request among all that fit, by bound and timeline.

PIPO's equation 1 asks three questions in a row: does everything fit on the GPU, else into RAM, and does preloading fit?
Here any part may lie anywhere, either stretch may be computed elsewhere, and time decides. Residences are looked at in
the order of their closed form, which none of them beats, until it is no better than the best timeline so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from scheduler.model.offload.candidates import WAYS, Residences
from scheduler.model.offload.dealing import dealt_problems, to_be_dealt
from scheduler.model.offload.fitting import all_residences, fit_together, possible, refusal
from scheduler.model.offload.problem import I64, Problem
from scheduler.model.offload.tasks import F64, Candidates, Mask, Tasks, bound
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import STRETCHES, KvTier, Offload, Pipeline, Stretch, kv_pages
from tpi.errors import PlanError

_AT_ONCE = 24  # residences that are simulated together
_NO_WORSE = 1.0001  # times the best: more than rounding to five digits hides
_STEPS = 2  # that are simulated: of more, the first has as little to say


@dataclass(frozen=True)
class OffloadChoice:
    """What was chosen, and the seconds that all prompts and all answers of the request are predicted to take."""

    offload: Offload
    prompt_seconds: float
    decode_seconds: float
    compared: int  # residences, each in every way of computing it
    simulated: int  # of them
    least: dict[tuple[KvTier, Pipeline], float]  # seconds by the closed form, for each place of the pages and pipeline

    @property
    def seconds(self) -> float:
        """Of the whole request."""
        return self.prompt_seconds + self.decode_seconds


def choose(problem: Problem) -> OffloadChoice:
    """The fastest configuration that fits and keeps to `problem.limits`, in the best way of dealing that is compared.

    Raises:
        PlanError: if none does; names the smallest setting that would do.
    """
    best: _Found | None = None
    for dealt in dealt_problems(problem) if to_be_dealt(problem) else [problem]:
        best = _choose(dealt, best[0] if best else (np.inf, 0)) or best
    if best is None:
        raise PlanError(refusal(problem))
    return best[1]


_Rank = tuple[float, int]
"""Seconds, to five digits, and minus the bytes that stay on the accelerators: of equal times the most that stays."""
_Found = tuple[_Rank, OffloadChoice]


def _choose(problem: Problem, within: _Rank) -> _Found | None:
    """Return the best of a problem that is dealt, with its rank; None if none is better than `within`."""
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
    return best[0], groups[best[1]].choice(best[2], len(ranked), simulated, least)


class _Group:
    """All residences for one place of the keys and values and one pipeline, each with the best ways to compute it."""

    def __init__(self, problem: Problem, of: Residences) -> None:
        self._of, self._blocks = of, problem.work.blocks
        self._steps = {stretch: problem.step(stretch) for stretch in STRETCHES}
        self._tasks = {
            stretch: Tasks.of(problem.work, problem.machine, size, problem.exchange, problem.cards)
            for stretch, (size, _) in self._steps.items()
        }
        self._least = {stretch: self._bounds(problem, stretch) for stretch in STRETCHES}
        self._problem = problem
        self._together: dict[tuple[int, int], Mask] = {}
        self._found: dict[int, tuple[tuple[float, int], tuple[float, int]]] = {}

    def rank(self, column: int, seconds: float) -> _Rank:
        """Return what a residence is compared by where it takes so many seconds."""
        return _digits(seconds, 5), -int(self._kept[column])

    @cached_property
    def _kept(self) -> I64:
        """Bytes of weights, keys and values that stay on the accelerators, `[candidates]`."""
        pages = kv_pages(self._problem.work, self._problem.request) if self._of.kv == "gpu" else 0
        found: I64 = np.where(self._of.gpu, self._problem.sizes, 0).sum(axis=0) + pages
        return found

    @cached_property
    def least(self) -> F64:
        """Seconds of the whole request at least, `[candidates]`; infinite for what does not fit."""
        total: F64 = sum((self._least[stretch].min(axis=0) for stretch in STRETCHES), np.zeros(self._of.count))
        return total

    def simulate(self, columns: Sequence[int], best: float) -> list[tuple[float, int]]:
        """The seconds of the whole request that some of the residences take, and which they are of.

        Ways that cannot take less than `best` are left out, and residences that have no other.
        """
        times: dict[Stretch, dict[int, list[tuple[float, int]]]] = {}
        for stretch, beside in (STRETCHES, STRETCHES[::-1]):
            other = self._least[beside].min(axis=0)
            ways = [
                (way, column)
                for column in columns
                for way in range(WAYS)
                if self._least[stretch][way, column] + other[column] < best
            ]
            columns = sorted({column for _, column in ways})
            times[stretch] = self._times(ways, stretch)
        prompt, decode = (times[stretch] for stretch in STRETCHES)
        self._found |= {
            column: pair for column in columns if (pair := self._pair(column, prompt[column], decode[column]))
        }
        pairs = ((self._found[column], column) for column in columns if column in self._found)
        return [(first[0] + then[0], column) for (first, then), column in pairs]

    def _pair(
        self, column: int, prompt: Sequence[tuple[float, int]], decode: Sequence[tuple[float, int]]
    ) -> tuple[tuple[float, int], tuple[float, int]] | None:
        """The fastest ways for both stretches that fit beside each other."""
        for first, then in sorted(product(prompt, decode), key=lambda pair: (pair[0][0] + pair[1][0], pair)):
            ways = first[1], then[1]
            if ways not in self._together:
                self._together[ways] = fit_together(self._problem, self._of, *ways)
            if self._together[ways][column]:
                return first, then
        return None

    @property
    def kind(self) -> tuple[KvTier, Pipeline]:
        """What they have in common."""
        return self._of.kv, self._of.pipeline

    def choice(
        self, column: int, compared: int, simulated: int, least: dict[tuple[KvTier, Pipeline], float]
    ) -> OffloadChoice:
        """One residence, as it was simulated."""
        (prompt, first), (decode, then) = self._found[column]
        return OffloadChoice(self._of.offload(column, first, then), prompt, decode, compared, simulated, least)

    def _times(self, ways: Sequence[tuple[int, int]], stretch: Stretch) -> dict[int, list[tuple[float, int]]]:
        """For each column the seconds of a stretch in each of its ways to compute it, and that way."""
        if not ways:
            return {}
        parts = [self._of.candidates(way, [column for of, column in ways if of == way]) for way in range(WAYS)]
        count, tasks = self._steps[stretch][1], self._tasks[stretch]
        steps = min(count, _STEPS)
        times = simulate_steps(tasks, Candidates.joined(parts), self._blocks, self._of.pipeline, steps).steps.sum(
            axis=0
        )
        seconds = dict(zip(sorted(ways), (times * (count / steps)).tolist(), strict=True))
        found: dict[int, list[tuple[float, int]]] = {}
        for (way, column), value in seconds.items():
            found.setdefault(column, []).append((_digits(value, 6), way))
        return found

    def _bounds(self, problem: Problem, stretch: Stretch) -> F64:
        """The closed form of every way to compute a stretch, `[WAYS, candidates]`; infinite for what cannot be."""
        found = np.full((WAYS, self._of.count), np.inf)
        for way in range(WAYS):
            fits = possible(problem, self._of, way, stretch)
            if fits.any():
                least = bound(self._tasks[stretch], self._of.candidates(way), self._blocks, self._of.pipeline)
                found[way] = np.where(fits, self._steps[stretch][1] * least, np.inf)
        return found


def _digits(seconds: float, digits: int) -> float:
    """So many digits of a time: of ways that differ in less, the first computes most where the weights lie."""
    return float(f"{seconds:.{digits}g}")
