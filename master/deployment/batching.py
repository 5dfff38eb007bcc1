"""Micro-batches across the nodes of a deployment: the decision to batch, and the settings that all nodes share."""

from collections.abc import Sequence
from dataclasses import replace

from scheduler.free import default_budget
from scheduler.model.nodefigures import machine_from_message
from scheduler.model.sizes import LONGEST_CHUNK
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.kernels.constants import PAGE_TOKENS
from tpi.net.fields import MAX_STEP_BYTES, Card, MachineSpeed
from tpi.net.messages import Assign
from worker.equipment import AcceleratorSetup
from worker.node_plan import node_plan
from worker.pipelines.agree import GroupMember, agree, fastest_batch, group_prefers
from worker.plan.fit import Tables, passing_bytes

_F32 = 4
_STEP_SHARE = 16  # a step's hidden states take at most 1/16 of a node's memory


MemberReport = tuple[tuple[str, Assign, Tables | None], Card | None, MachineSpeed | None]
"""The name, plan and tables of a node, its accelerator, and the speed that it reports."""


def members_of(told: Sequence[MemberReport], asked: OffloadOptions, own: AcceleratorSetup | None) -> list[GroupMember]:
    """Return the nodes of a deployment, as input for the planning of batches.

    Args:
        told: each node's name, plan, tables, accelerator and speed, the master first.
        asked: the options of the master's user.
        own: the master's accelerator setup.
    """
    found: list[GroupMember] = []
    for (name, plan, tables), card, speed in told:
        machine = machine_from_message(plan.options.memory or default_budget(), card, speed)
        if not found and own is not None:
            machine = own.machine
        found.append(GroupMember(name, node_plan(plan), machine, card.options if card else asked, tables))
    return found


def fastest(members: Sequence[GroupMember], asked: OffloadOptions) -> int:
    """Return the number of concurrent requests that is predicted to be fastest; 0 if no node batches.

    It is at most the number that the nodes have pages for.

    Raises:
        PlanError: if a node is told to batch and cannot. The error names the node.
    """
    long, demanded = with_longest_steps(members, asked.unattended), _demands_batches(members)
    return fastest_batch(long, demanded) if demanded or _left_open(members, asked) else 0


def batched(
    plans: Sequence[Assign], members: Sequence[GroupMember], asked: OffloadOptions, batch: int = 0
) -> list[Assign]:
    """Return the plans. If the nodes will batch, fill in the common batch settings.

    `batch` is the number of requests that `fastest` returned. If it is 0, decide here whether to batch, and how many.
    `asked` are the options of the master's user.

    Raises:
        PlanError: if the options demand batches and a node cannot batch. The error names the node.
    """
    long = with_longest_steps(members, asked.unattended)
    if not batch and not _wanted(long, asked):
        return list(plans)
    together, steps = agree(long, batch=batch or None), long[0].plan.options.prefill_tokens
    options = [replace(plan.options, prefill_tokens=steps, batch=together) for plan in plans]
    return [replace(plan, options=own) for plan, own in zip(plans, options, strict=True)]


def longest_step(member: GroupMember) -> int:
    """Return the maximum number of prompt tokens in one step of `member`.

    It is the KV cache's capacity, limited by the memory for hidden states and the size of a message between nodes.
    """
    plan = member.plan
    memory = plan.options.memory or member.machine.memory
    most = min(plan.options.pages * PAGE_TOKENS, memory // _STEP_SHARE // passing_bytes(plan))
    if plan.size > 1:
        most = min(most, MAX_STEP_BYTES // (_F32 * max(plan.config.hidden, plan.config.per_layer_values)))
    return max(LONGEST_CHUNK, most)


def with_longest_steps(members: Sequence[GroupMember], many: bool) -> list[GroupMember]:
    """Return the members with the same `prefill_tokens`, the longest step of a prompt, in all their plans.

    With `many` requests, it is the longest step that all members can run; else `LONGEST_CHUNK`.
    """
    steps = min(map(longest_step, members)) if many else LONGEST_CHUNK
    options = [replace(member.plan.options, prefill_tokens=steps) for member in members]
    plans = [replace(member.plan, options=own) for member, own in zip(members, options, strict=True)]
    return [replace(member, plan=plan) for member, plan in zip(members, plans, strict=True)]


def _wanted(members: Sequence[GroupMember], asked: OffloadOptions) -> bool:
    """Return True if a node's options demand batching, or allow it and the prediction is faster with batching."""
    return _demands_batches(members) or (_left_open(members, asked) and group_prefers(members))


def _demands_batches(members: Sequence[GroupMember]) -> bool:
    """Return True if a node's options demand batching; nodes that compute only active neurons cannot batch."""
    cards = [member for member in members if member.machine.accelerator is not None]
    asking = next((member for member in cards if member.options.pipeline == "batch"), None)
    if asking is not None and len(members) > 1 and _sparse(members):
        raise PlanError(
            f"{asking.name}: nodes that compute only active neurons cannot batch; add --sparsity off", asking.name
        )
    return asking is not None and not _sparse(members)


def _left_open(members: Sequence[GroupMember], asked: OffloadOptions) -> bool:
    return asked.pipeline == "auto" and asked.unattended and asked.crossover is None and not _sparse(members)


def _sparse(members: Sequence[GroupMember]) -> bool:
    return any(member.plan.options.sparsity != "off" for member in members)
