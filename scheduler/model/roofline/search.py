"""The best policy for a batch: (N, mu) by enumeration, the other four by a mixed integer linear program.

Pairs of a batch and a number of micro-batches are looked at in the order of a bound (each roof at its own best within
what the memories together leave) until none can beat the best, to within `GAP`. The nodes of a group have one pair
together: a step takes as long as the slowest of them, and fits where it fits all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np

from scheduler.model.roofline.combinations import Combination, solve_pair
from scheduler.model.roofline.latency import F64
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem
from tpi.errors import PlanError

GAP = 1e-4  # of the time per sequence, from the best that could be
_PAIRS = 64  # batches, and numbers of micro-batches, that are compared at most: of more, some evenly by their ratio
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
    batches, parts = _pairs(problems[0])
    nodes = [_Node(problem, batches, parts) for problem in problems]
    least: F64 = np.max([node.least for node in nodes], axis=0)
    best, policies, solved = inf, list[BatchPolicy](), 0
    for at in np.argsort(least, kind="stable").tolist():
        if least[at] >= best * (1 - GAP):
            break
        solved += 1
        found = [node.solved(at, best) for node in nodes]
        known = [each for each in found if each is not None]
        if len(known) == len(nodes) and max(seconds for seconds, _ in known) < best:
            best, policies = max(seconds for seconds, _ in known), [policy for _, policy in known]
    if not policies:
        raise PlanError(_refusal(problems[int(np.argmax([node.least.min() for node in nodes]))]))
    return GroupChoice(tuple(policies), len(batches), solved)


class _Node:
    """What one node makes of every pair: `least` are its seconds per sequence at least, `[pairs]`."""

    def __init__(self, problem: BatchProblem, batches: F64, parts: F64) -> None:
        self._problem = problem
        self._tables = [Combination(problem, batches, parts, *places) for places in _places(problem)]
        bounds = [table.bounds for table in self._tables]
        self.least: F64 = np.min(bounds, axis=0) if bounds else np.full(len(batches), inf)

    def solved(self, at: int, limit: float) -> tuple[float, BatchPolicy] | None:
        """Its seconds per sequence with pair number `at`, and the policy; None if that is not below `limit`."""
        tables = [table for table in self._tables if table.bounds[at] < limit and table.bound(at) < limit]
        return solve_pair(self._problem, tables, at, float(self.least[at])) if tables else None


def _places(problem: BatchProblem) -> list[tuple[bool, bool, bool, bool]]:
    """Which of attention, neurons and residual connections the accelerator computes, with keys and values divided."""
    either = (False, True) if problem.machine.accelerator else (False,)
    allowed = [places for places in product(either, either, either) if problem.limits.allow(*places)]
    return [
        (attention, ffn, adds, divided)
        for attention, ffn, divided in allowed
        for adds in ((True, False) if attention or ffn else (True,))
    ]


def _pairs(problem: BatchProblem) -> tuple[F64, F64]:
    """Batches and numbers of micro-batches, `[pairs]` each: every pair where there are few."""
    asked, batch = problem.limits.micro_batches, problem.limits.batch
    found = [
        (batch, parts)
        for batch in ([batch] if batch else _numbers(problem.request.most))
        for parts in ([min(asked, batch)] if asked else _numbers(batch))
    ]
    batches, parts = np.array(found, np.float64).T
    return batches, parts


def _numbers(most: int) -> list[int]:
    """1 to `most`, or as many of them as are compared."""
    if most <= _PAIRS:
        return list(range(1, most + 1))
    return sorted({*np.geomspace(1, most, _PAIRS).round().astype(int).tolist(), most})


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
