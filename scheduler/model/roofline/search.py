"""The search for the best policy of a batch: (N, mu) by enumeration, all else by a mixed integer linear program.

Pairs of a batch and a number of micro-batches are solved in the order of a lower bound, until no pair can beat the best
by more than `GAP`. If there are too many pairs, the first ones compared form a geometric series, and further ones lie
ever closer to the best. All nodes of a group use the same pair. A step takes as long as the slowest node, and a pair
must fit on all nodes.
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

GAP = 1e-4  # the time per sequence may exceed the best possible one by this share
_PAIRS = 64  # the most batches, and the most numbers of micro-batches, that are compared at first
_FINER = 32  # the most batches, and numbers of micro-batches, that are compared around the best
_TOGETHER = 128  # pairs that are bounded at once
_MIB = 1 << 20


@dataclass(frozen=True)
class BatchChoice:
    """The policy chosen for a batch.

    `compared` and `solved` count the pairs (batch size, number of micro-batches) that were compared, and those whose
    linear program was solved.
    """

    policy: BatchPolicy
    compared: int
    solved: int


@dataclass(frozen=True)
class GroupChoice:
    """The policies chosen for the nodes of a group, all with the same batch size and number of micro-batches.

    `compared` and `solved` count the pairs (batch size, number of micro-batches) that were compared, and those whose
    linear program was solved.
    """

    policies: tuple[BatchPolicy, ...]
    compared: int
    solved: int


def best_policy(problem: BatchProblem) -> BatchChoice:
    """Return the policy with the highest throughput that fits.

    Raises:
        PlanError: if no policy fits, or `problem.limits` allow none.
    """
    found = best_policies([problem])
    return BatchChoice(found.policies[0], found.compared, found.solved)


def best_policies(problems: Sequence[BatchProblem]) -> GroupChoice:
    """Return a policy for each node of a group, all with the same batch size and number of micro-batches.

    They are the policies with which the slowest node takes the least time for the requests.

    Raises:
        PlanError: if no pair fits on all nodes.
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
    """The search for the batch size and the number of micro-batches with the fewest seconds per sequence.

    `policies` has each node's policy for the best such pair so far. It is empty while no pair is known to fit.
    """

    def __init__(self, problems: Sequence[BatchProblem]) -> None:
        self._problems, self._best = problems, inf
        self.policies: tuple[BatchPolicy, ...] = ()
        self.compared = self.solved = self.tightest = 0

    def look(self, batches: F64, parts: F64) -> None:
        """Solve pairs in the order of their lower bounds, until none can beat the best pair so far.

        Pair number i is of `batches[i]` sequences in `parts[i]` micro-batches. A pair has a rough bound and an exact
        one, which takes longer to calculate. So exact bounds are calculated in the order of the rough ones, and only
        for as many pairs as needed.
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
        promising = [node.promising(at, self._best) for node in nodes]
        if not all(promising):
            return
        self.solved += 1
        known = [found for node, tables in zip(nodes, promising, strict=True) if (found := node.solved(at, tables))]
        if len(known) == len(nodes) and max(seconds for seconds, _ in known) < self._best:
            self._best, self.policies = max(seconds for seconds, _ in known), tuple(policy for _, policy in known)


@dataclass(frozen=True)
class _Sizes:
    """The batch sizes and the numbers of micro-batches to compare.

    If `parts` is None, each batch is compared with every number of micro-batches that it allows.
    """

    batches: list[int]
    parts: list[int] | None = None

    @classmethod
    def first(cls, problem: BatchProblem) -> "_Sizes":
        """Return all sizes or, if there are too many, a geometric series of them."""
        asked, batch = problem.limits.micro_batches, problem.limits.batch
        return cls([batch] if batch else _numbers(problem.request.most), [asked] if asked else None)

    def pairs(self, problem: BatchProblem) -> tuple[F64, F64]:
        """Return the pairs to compare as two arrays `[pairs]`: the batch size and the number of micro-batches of
        each.
        """
        found = [(batch, part) for batch in self.batches for part in sorted(set(self._parts(problem, batch)))]
        batches, parts = np.array(found, np.float64).T
        return batches, parts

    def around(self, best: BatchPolicy) -> "_Sizes | None":
        """Return the sizes from the next smaller to the next larger one of `best`'s sizes.

        Return None if all were compared already.
        """
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
    """One node's lower bounds of the seconds per sequence, `[pairs]`.

    `rough` is known from the start. `least` is equal to `rough` until `look_at` calculates a larger bound. Both are
    infinite if a pair does not fit into the memories.
    """

    def __init__(self, problem: BatchProblem, batches: F64, parts: F64) -> None:
        self._problem = problem
        self._tables = [Combination(problem, batches, parts, *places) for places in _places(problem)]
        nothing = np.full(len(batches), inf)
        self.rough: F64 = np.min([nothing, *(table.rough for table in self._tables)], axis=0)
        self.least = self.rough.copy()

    def look_at(self, pairs: I64) -> F64:
        """Calculate `least` of the pairs numbered `pairs`, and return it."""
        for table in self._tables:
            table.look_at(pairs)
        self.least[pairs] = np.min([np.full(len(pairs), inf), *(table.bounds[pairs] for table in self._tables)], axis=0)
        found: F64 = self.least[pairs]
        return found

    def promising(self, at: int, limit: float) -> list[Combination]:
        """Return the combinations of places with which pair number `at` may take less than `limit` s per sequence."""
        return [table for table in self._tables if table.bounds[at] < limit and table.bound(at) < limit]

    def solved(self, at: int, tables: list[Combination]) -> tuple[float, BatchPolicy] | None:
        """Return the seconds per sequence of pair number `at` with its best policy.

        Return None if no policy of `tables` fits.
        """
        return solve_pair(self._problem, tables, at, float(self.least[at]))


def _places(problem: BatchProblem) -> list[tuple[bool, bool, bool, bool]]:
    """Return the allowed places of attention, neurons and residual connections, and whether KV heads are divided."""
    either = (False, True) if problem.machine.accelerator else (False,)
    allowed = [places for places in product(either, either, either) if problem.limits.allow(*places)]
    return [
        (attention, ffn, adds, divided)
        for attention, ffn, divided in allowed
        for adds in ((True, False) if attention or ffn else (True,))
    ]


def _numbers(most: int) -> list[int]:
    """Return the numbers from 1 to `most`; if there are too many, a geometric series of them."""
    if most <= _PAIRS:
        return list(range(1, most + 1))
    return sorted({*np.geomspace(1, most, _PAIRS).round().astype(int).tolist(), most})


def _between(numbers: Sequence[int], best: int) -> list[int]:
    """Return numbers between the two neighbours of `best` in `numbers`: all of them, or `_FINER` evenly spaced ones."""
    if len(numbers) == 1:  # the user fixed it
        return list(numbers)
    at = int(np.searchsorted(numbers, best))
    first, last = numbers[max(0, at - 1)], numbers[min(at + 1, len(numbers) - 1)]
    found = np.linspace(first, last, min(_FINER, last - first + 1)).round().astype(int).tolist()
    return sorted({*found, best})


def _refusal(problem: BatchProblem) -> str:
    machine, device = problem.machine, problem.machine.accelerator
    memories = f"{int(machine.memory) // _MIB}MiB of memory"
    if device is not None:
        memories += f" and {int(device.memory) // _MIB}MiB of {device.name} memory"
    return (
        f"{memories} cannot hold the model and one sequence of {problem.request.room} tokens; "
        "give more --memory or --gpu-memory, or shorter prompts and answers"
    )
