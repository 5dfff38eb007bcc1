"""What the nodes of a group have to have alike to compute a batch in micro-batches: decided by the master for them all.

Every sum is of one micro-batch on all nodes, so these have the same sequences on each, in the same order. The node with
the least room bounds how many there are, the slowest how long they take; where weights lie, and who attends, remains
each node's own choice.
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
from worker.pipelines.decide import leaves_open, refusal
from worker.pipelines.plan import batch_problem, prompt_chunk
from worker.plan.fit import Tables
from worker.plan.node_plan import NodePlan

_ALIKE = 1.01  # times as long is as fast


@dataclass(frozen=True)
class GroupMember:
    """A node of a group as the master knows it: its part of the model, its machine, what its owner says."""

    name: str
    plan: NodePlan
    machine: NodeMachine
    options: OffloadOptions
    tables: Tables | None = None


def agree(members: Sequence[GroupMember], sums: SumCost | None = None, batch: int | None = None) -> GroupBatch:
    """The batch with which the slowest of them is fastest; `sums` is what each sum costs, `batch` an N that is decided.

    Raises:
        PlanError: if one cannot hold a single sequence, or so many, or its owner asks for another pipeline; names it.
    """
    for member in members:
        _check_owner(member)
    chunk, problems = _problems(members, sums)
    policies = _best(members, [replace(each, limits=replace(each.limits, batch=batch)) for each in problems])
    host_attends = any(
        not policy.attention_there
        for policy, member in zip(policies, members, strict=True)
        if member.machine.accelerator is not None
    )
    return GroupBatch(policies[0].batch, policies[0].micro_batches, host_attends, chunk)


def group_prefers(members: Sequence[GroupMember]) -> bool:
    """Whether the roofline model has every accelerator compute neurons; there is one at least."""
    return bool(_preferred(members, _problems(members)[1]))


def fastest_batch(members: Sequence[GroupMember], insists: bool) -> int:
    """The N with which the slowest of them is fastest, where there are pages for that many alone: of all that they have
    pages for now. One search also says whether every accelerator is to compute neurons; 0: not so. `insists`: it is.

    Raises:
        PlanError: as `agree`, if somebody insists.
    """
    problems = [replace(each, pool=0) for each in _problems(members)[1]]
    if not insists:
        return next((policy.batch for policy in _preferred(members, problems)), 0)
    for member in members:
        _check_owner(member)
    return _best(members, problems)[0].batch


def _preferred(members: Sequence[GroupMember], problems: Sequence[BatchProblem]) -> Sequence[BatchPolicy]:
    """The policies with which the slowest is fastest, if every accelerator computes neurons then; else none.

    A node for which nobody waits may do without: then all are to compute them if the slowest is as fast that way.
    """
    cards = [member for member in members if member.machine.accelerator is not None]
    if not cards or not all(leaves_open(member.plan, member.machine, member.options) for member in cards):
        return ()
    open_ones = [replace(each, limits=replace(each.limits, ffn_there=None)) for each in problems]
    try:
        policies = best_policies(open_ones).policies
        chosen = zip(policies, members, strict=True)
        there = {policy.ffn_there for policy, member in chosen if member.machine.accelerator is not None}
        if len(there) == 1:
            return policies if there == {True} else ()
        alike = best_policies(problems).policies
    except PlanError:
        return ()
    return alike if _slowest(problems, alike) <= _ALIKE * _slowest(problems, policies) else ()


def _slowest(problems: Sequence[BatchProblem], policies: Sequence[BatchPolicy]) -> float:
    """Seconds of a sequence on the node for which the others wait."""
    return max(seconds(problem, policy) / policy.batch for problem, policy in zip(problems, policies, strict=True))


def _problems(members: Sequence[GroupMember], sums: SumCost | None = None) -> tuple[int, list[BatchProblem]]:
    """Tokens of a prompt's chunk, and what each node is asked with that."""
    chunk = min(prompt_chunk(member.plan, member.machine) for member in members)
    return chunk, [_problem(member, chunk, sums or SumCost()) for member in members]


def _problem(member: GroupMember, chunk: int, sums: SumCost) -> BatchProblem:
    """As the node will be asked, but for what is to be agreed on."""
    options = replace(member.plan.options, batch=GroupBatch(1, 1, True, chunk))
    asked = batch_problem(replace(member.plan, options=options), member.machine, member.options, member.tables)
    return replace(asked, limits=replace(asked.limits, batch=None, micro_batches=None), sums=sums)


def _best(members: Sequence[GroupMember], problems: Sequence[BatchProblem]) -> Sequence[BatchPolicy]:
    """What suits all; else the refusal of the first that could not even be alone."""
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
            f"{member.name} is to use --pipeline {member.options.pipeline}, and all nodes compute a batch alike; leave "
            "it out there, or --pipeline batch here",
            member.name,
        )
    if why := refusal(member.plan, member.machine, member.options):
        raise PlanError(f"{member.name}: {why}", member.name)
