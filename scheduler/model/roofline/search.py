"""The best policy for a batch: (N, mu) by enumeration, the other four by a mixed integer linear program.

Pairs of a batch and a number of micro-batches are looked at in the order of a bound (each roof at its own best within
what the memories together leave) until none can beat the best, to within `GAP`. Where there are too many, some are
compared, evenly by their ratio, then ever finer ones around the best. The nodes of a group have one pair together: a
step takes as long as the slowest of them, and fits where it fits all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf

import numpy as np

from scheduler.model.roofline.combinations import I64, Combination, solve_pair
from scheduler.model.roofline.latency import F64
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem
from tpi.errors import PlanError

GAP = 1e-4  # of the time per sequence, from the best that could be
_PAIRS = 64  # batches, and numbers of micro-batches, that are compared at first: of more, some
_FINER = 32  # around the best of them
_TOGETHER = 128  # pairs that are bounded at once
_MIB = 1 << 20


@dataclass(frozen=True)
class BatchChoice:
    """The policy, and how many pairs were compared and solved for."""

    policy: BatchPolicy
    compared: int
    solved: int


@dataclass(frozen=True)
class GroupChoice:
    """The policy of every node of a group, with one (N, mu) for all of them; the rest as `BatchChoice`."""

    policies: tuple[BatchPolicy, ...]
    compared: int
    solved: int


def best_policy(problem: BatchProblem) -> BatchChoice:
    """The policy with the highest throughput that fits.

    Raises:
        PlanError: if none fits, or `problem.limits` leave none.
    """
    found = best_policies([problem])
    return BatchChoice(found.policies[0], found.compared, found.solved)


def best_policies(problems: Sequence[BatchProblem]) -> GroupChoice:
    """Those of the nodes of a group, for the same requests, with which the slowest node is fastest.

    Raises:
        PlanError: if none fit all nodes.
    """
    finder = _Finder(problems)
    sizes: _Sizes | None = _Sizes.first(problems[0])
    while sizes is not None:
        finder.look(*sizes.pairs(problems[0]))
        sizes = sizes.around(finder.policies[0]) if finder.policies else None
    if not finder.policies:
        raise PlanError(_refusal(problems[finder.tightest]))
    return GroupChoice(finder.policies, finder.compared, finder.solved)


class _Finder:
    """The best of all pairs that were looked at: `policies` of the nodes, if any fit."""

    def __init__(self, problems: Sequence[BatchProblem]) -> None:
        self._problems, self._best = problems, inf
        self.policies: tuple[BatchPolicy, ...] = ()
        self.compared = self.solved = self.tightest = 0

    def look(self, batches: F64, parts: F64) -> None:
        """At these pairs, in the order of their bound, until none can beat the best.

        Bounds are found out in parts, in the order of a rough one, as far as they are needed.
        """
        nodes = [_Node(problem, batches, parts) for problem in self._problems]
        rough: F64 = np.max([node.rough for node in nodes], axis=0)
        order, bounded = np.argsort(rough, kind="stable"), list[tuple[float, int]]()
        self.compared += len(batches)
        while len(order) or bounded:
            ahead = float(rough[order[0]]) if len(order) else inf
            if min([ahead, *(bound for bound, _ in bounded[:1])]) >= self._best * (1 - GAP):
                break
            if bounded and bounded[0][0] <= ahead:
                self._solve(nodes, heappop(bounded)[1])
                continue
            few, order = order[:_TOGETHER], order[_TOGETHER:]
            least = np.max([node.look_at(few) for node in nodes], axis=0)
            for bound, at in zip(least.tolist(), few.tolist(), strict=True):
                heappush(bounded, (bound, at))
        self.tightest = int(np.argmax([node.least.min() for node in nodes]))

    def _solve(self, nodes: "Sequence[_Node]", at: int) -> None:
        worth = [node.worth(at, self._best) for node in nodes]
        if not all(worth):
            return
        self.solved += 1
        known = [found for node, tables in zip(nodes, worth, strict=True) if (found := node.solved(at, tables))]
        if len(known) == len(nodes) and max(seconds for seconds, _ in known) < self._best:
            self._best, self.policies = max(seconds for seconds, _ in known), tuple(policy for _, policy in known)


@dataclass(frozen=True)
class _Sizes:
    """Which batches are compared, and which numbers of micro-batches; `parts` is None for all that a batch may have."""

    batches: list[int]
    parts: list[int] | None = None

    @classmethod
    def first(cls, problem: BatchProblem) -> "_Sizes":
        """All that there are, or some of them, evenly by their ratio."""
        asked, batch = problem.limits.micro_batches, problem.limits.batch
        return cls([batch] if batch else _numbers(problem.request.most), [asked] if asked else None)

    def pairs(self, problem: BatchProblem) -> tuple[F64, F64]:
        """Batches and numbers of micro-batches, `[pairs]` each."""
        found = [(batch, part) for batch in self.batches for part in sorted(set(self._parts(problem, batch)))]
        batches, parts = np.array(found, np.float64).T
        return batches, parts

    def around(self, best: BatchPolicy) -> "_Sizes | None":
        """Finer ones between the neighbours of the best; None where nothing lies between."""
        parts = self.parts or _numbers(best.batch)
        finer = _between(self.batches, best.batch), _between(parts, best.micro_batches)
        known = set(self.batches), set(parts)
        if all(set(new) <= old for new, old in zip(finer, known, strict=True)):
            return None
        return _Sizes(*finer)

    def _parts(self, problem: BatchProblem, batch: int) -> list[int]:
        if self.parts is None:
            return _numbers(batch)
        return [min(part, batch) for part in self.parts]


class _Node:
    """What one node makes of every pair: `least` are its seconds per sequence at least, `[pairs]`, as far as known.

    `rough` are fewer, and known at once; infinite where memories rule a pair out.
    """

    def __init__(self, problem: BatchProblem, batches: F64, parts: F64) -> None:
        self._problem = problem
        self._tables = [Combination(problem, batches, parts, *places) for places in _places(problem)]
        nothing = np.full(len(batches), inf)
        self.rough: F64 = np.min([nothing, *(table.rough for table in self._tables)], axis=0)
        self.least = self.rough.copy()

    def look_at(self, pairs: I64) -> F64:
        """Know these pairs, by number; their `least`."""
        for table in self._tables:
            table.look_at(pairs)
        self.least[pairs] = np.min([np.full(len(pairs), inf), *(table.bounds[pairs] for table in self._tables)], axis=0)
        found: F64 = self.least[pairs]
        return found

    def worth(self, at: int, limit: float) -> list[Combination]:
        """With which pair number `at` may take less than `limit` seconds per sequence."""
        return [table for table in self._tables if table.bounds[at] < limit and table.bound(at) < limit]

    def solved(self, at: int, tables: list[Combination]) -> tuple[float, BatchPolicy] | None:
        """The seconds per sequence of pair number `at` with the best of these, and the policy; None if none fits."""
        return solve_pair(self._problem, tables, at, float(self.least[at]))


def _places(problem: BatchProblem) -> list[tuple[bool, bool, bool, bool]]:
    """Which of attention, neurons and residual connections the accelerator computes, with keys and values divided."""
    either = (False, True) if problem.machine.accelerator else (False,)
    allowed = [places for places in product(either, either, either) if problem.limits.allow(*places)]
    return [
        (attention, ffn, adds, divided)
        for attention, ffn, divided in allowed
        for adds in ((True, False) if attention or ffn else (True,))
    ]


def _numbers(most: int) -> list[int]:
    """1 to `most`, or as many of them as are compared."""
    if most <= _PAIRS:
        return list(range(1, most + 1))
    return sorted({*np.geomspace(1, most, _PAIRS).round().astype(int).tolist(), most})


def _between(numbers: Sequence[int], best: int) -> list[int]:
    """From the one below the best to the one above it, or as many of them as are compared."""
    if len(numbers) == 1:  # it was insisted on
        return list(numbers)
    at = int(np.searchsorted(numbers, best))
    first, last = numbers[max(0, at - 1)], numbers[min(at + 1, len(numbers) - 1)]
    found = np.linspace(first, last, min(_FINER, last - first + 1)).round().astype(int).tolist()
    return sorted({*found, best})


def _refusal(problem: BatchProblem) -> str:
    """Why nothing fits."""
    machine, device = problem.machine, problem.machine.accelerator
    memories = f"{int(machine.memory) // _MIB}MiB of memory"
    if device is not None:
        memories += f" and {int(device.memory) // _MIB}MiB of {device.name} memory"
    return (
        f"{memories} hold not one sequence of {problem.request.room} tokens beside what this model takes; "
        "give more --memory or --gpu-memory, or shorter prompts and answers"
    )
