"""The settings that all nodes of a group share to compute a batch in micro-batches. The master chooses them.

Each sum over the nodes is of one micro-batch. So all nodes must have the same micro-batches, and compute them in the
same order. The node with the least memory limits their size, and the slowest node determines their time. Each node
decides by itself where its weights lie, and whether the host or the accelerator computes attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.model.machine import NodeMachine
from scheduler.model.roofline.latency import seconds
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, SumCost
from scheduler.model.roofline.search import best_policies, best_policy
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.net.fields import GroupBatch
from worker.node_plan import NodePlan
from worker.plan.fit import Tables
from worker.plan.modes.batch import batch_problem, batches_allowed, prompt_chunk, refusal

_ALIKE = 1.01  # times that differ by at most this factor count as equal


@dataclass(frozen=True)
class GroupMember:
    """A node of a group as the master knows it: its part of the model, its machine, and its owner's options."""

    name: str
    plan: NodePlan
    machine: NodeMachine
    options: OffloadOptions
    tables: Tables | None = None


def agree(members: Sequence[GroupMember], sums: SumCost | None = None, batch: int | None = None) -> GroupBatch:
    """Return the batch settings with which the slowest node is predicted to take the least time.

    Args:
        members: all nodes of the group.
        sums: the cost of each sum over the nodes; by default 0.
        batch: the number of sequences to compute at once; None: choose it too.

    Raises:
        PlanError: if a node cannot hold one sequence, or `batch` sequences, or if its owner's options rule out batches.
            The error names the node.
    """
    for member in members:
        _check_owner(member)
    chunk, problems = group_problems(members, sums)
    policies = _best(members, [replace(each, limits=replace(each.limits, batch=batch)) for each in problems])
    host_attends = any(
        not policy.attention_there
        for policy, member in zip(policies, members, strict=True)
        if member.machine.accelerator is not None
    )
    return GroupBatch(policies[0].batch, policies[0].micro_batches, host_attends, chunk)


def group_prefers(members: Sequence[GroupMember]) -> bool:
    """Return True if the roofline model predicts that batches on the accelerators make this group faster.

    The result is False if the group has no accelerators, or if one of them cannot or may not compute batches. Else it
    is True if every accelerator computes feed-forward neurons in the fastest policies, or in policies that are at most
    1% slower.
    """
    return bool(_preferred(members, group_problems(members)[1]))


def fastest_batch(members: Sequence[GroupMember], demanded: bool) -> int:
    """Return the number of sequences to compute at once so that the slowest node is fastest; 0 for no batches.

    The number is at most that for which the nodes have KV pages now. Memory is counted as if the nodes had KV pages for
    only that number of sequences.

    Args:
        members: all nodes of the group.
        demanded: True if the user asked for batches. If False, the roofline model decides whether to compute batches.

    Raises:
        PlanError: if the user asked for batches and `agree` would refuse them.
    """
    problems = [replace(each, pool=0) for each in group_problems(members)[1]]
    if not demanded:
        return next((policy.batch for policy in _preferred(members, problems)), 0)
    for member in members:
        _check_owner(member)
    return _best(members, problems)[0].batch


def _preferred(members: Sequence[GroupMember], problems: Sequence[BatchProblem]) -> Sequence[BatchPolicy]:
    """Return one policy per node under which all accelerators compute feed-forward neurons; empty if that is slower.

    First find the policies with which the slowest node is fastest. If all accelerators compute neurons in them, return
    them. If only some accelerators do, return the best policies in which all do, provided that the slowest node takes
    at most 1% longer. In all other cases return an empty sequence.
    """
    cards = [member for member in members if member.machine.accelerator is not None]
    if not cards or not all(batches_allowed(member.plan, member.machine, member.options) for member in cards):
        return ()
    open_ones = [replace(each, limits=replace(each.limits, ffn_there=None)) for each in problems]
    try:
        policies = best_policies(open_ones).policies
        chosen = zip(policies, members, strict=True)
        choices = {policy.ffn_there for policy, member in chosen if member.machine.accelerator is not None}
        if len(choices) == 1:
            return policies if choices == {True} else ()
        alike = best_policies(problems).policies
    except PlanError:
        return ()
    return alike if _slowest(problems, alike) <= _ALIKE * _slowest(problems, policies) else ()


def _slowest(problems: Sequence[BatchProblem], policies: Sequence[BatchPolicy]) -> float:
    """Return the predicted seconds per sequence of the slowest node, given each node's problem and its policy."""
    return max(seconds(problem, policy) / policy.batch for problem, policy in zip(problems, policies, strict=True))


def group_problems(members: Sequence[GroupMember], sums: SumCost | None = None) -> tuple[int, list[BatchProblem]]:
    """Return the largest number of prompt tokens that every node can compute at once, and each node's roofline problem.

    A roofline problem is the input of the roofline model: a node's work, memory and speeds.
    """
    chunk = min(prompt_chunk(member.plan, member.machine) for member in members)
    return chunk, [_problem(member, chunk, sums or SumCost()) for member in members]


def _problem(member: GroupMember, chunk: int, sums: SumCost) -> BatchProblem:
    """Return the roofline problem of one node; the batch size and the number of micro-batches are left open."""
    options = replace(member.plan.options, batch=GroupBatch(1, 1, True, chunk))
    asked = batch_problem(replace(member.plan, options=options), member.machine, member.options, member.tables)
    return replace(asked, limits=replace(asked.limits, batch=None, micro_batches=None), sums=sums)


def _best(members: Sequence[GroupMember], problems: Sequence[BatchProblem]) -> Sequence[BatchPolicy]:
    """Return the policy of each node with which the slowest node is fastest.

    Raises:
        PlanError: if no policies fit all nodes; names the first node that has no policy even by itself, if any.
    """
    try:
        return best_policies(problems).policies
    except PlanError:
        for member, problem in zip(members, problems, strict=True):
            _check_alone(member, problem)
        raise


def _check_alone(member: GroupMember, problem: BatchProblem) -> None:
    try:
        best_policy(problem)
    except PlanError as error:
        raise PlanError(f"{member.name}: {error}", member.name) from None


def _check_owner(member: GroupMember) -> None:
    if member.machine.accelerator is None:
        return
    if member.options.pipeline not in ("auto", "batch"):
        raise PlanError(
            f"{member.name} uses --pipeline {member.options.pipeline}, but all nodes must compute a batch in the same "
            f"way; leave --pipeline out on {member.name}, or leave out --pipeline batch on the master",
            member.name,
        )
    if why := refusal(member.plan, member.machine, member.options):
        raise PlanError(f"{member.name}: {why}", member.name)
