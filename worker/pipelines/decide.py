"""The choice of the kind of plan for a node's accelerators: batches, experts on demand, or ordinary offloading."""

from collections.abc import Callable

from scheduler.model.machine import NodeMachine
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from worker.demand.offload import decide_experts
from worker.neurons.plan import refuse_insistence
from worker.pipelines.plan import decide_batch, prefers_batches
from worker.plan.fit import Tables
from worker.plan.node_plan import NodePlan
from worker.plan.offload import OffloadPlan, check_offload, decide_offload

Decide = Callable[[NodePlan, NodeMachine, OffloadOptions, Tables | None], OffloadPlan]
"""The type of `decide_accelerator`."""


def decide_accelerator(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> OffloadPlan:
    """Choose the plan of a node's accelerators.

    Args:
        plan: the node's part of the deployment.
        machine: the node's speeds and memory. An accelerator's memory is what is free for this plan.
        options: the user's choices.
        tables: tables and predictors, on the master.

    Raises:
        PlanError: if the options contradict each other, or do not allow a plan that fits.
    """
    _check_asked(plan, machine, options)
    if _batches(plan, machine, options, tables):
        return decide_batch(plan, machine, options, tables)
    return decide_experts(plan, machine, options, tables) or decide_offload(plan, machine, options, tables)


def check_accelerator(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> None:
    """Check that a plan fits into `machine` in a way that `options` allow, before any weight moves.

    Raises:
        PlanError: if the options contradict each other, or do not allow a plan that fits.
    """
    _check_asked(plan, machine, options)
    refuse_insistence(plan, options)
    if _batches(plan, machine, options, tables):
        decide_batch(plan, machine, options, tables)
    elif options.pipeline == "demand":
        decide_experts(plan, machine, options, tables)
    else:
        check_offload(plan, machine, options, tables)


def refusal(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> str:
    """Return why a node with an accelerator cannot compute batches and what to do; empty if it can."""
    if why := several_cards(machine):
        return why
    if flag := _idle(plan, options):
        return (
            f"--{flag} has no effect with --pipeline batch, which computes every step layer by layer; "
            "leave out one of the two"
        )
    return ""


def several_cards(machine: NodeMachine) -> str:
    """Return why a node with several accelerators cannot compute micro-batches; empty if it has at most one."""
    if not machine.more:
        return ""
    return "--pipeline batch computes on one accelerator, and several are named; give --device once"


def may_choose_batches(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> bool:
    """Return True if batches are possible and the user left the choice of the pipeline open."""
    return options.pipeline == "auto" and not refusal(plan, machine, options)


def _batches(plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None) -> bool:
    """Return True if the node computes batches.

    It does if the master or the user says so. If the choice is open, it does only if it is alone and has many requests.
    The roofline model must then predict that its accelerator should compute neurons.
    """
    if plan.options.batch is not None:
        return True
    if not options.many or not may_choose_batches(plan, machine, options):
        return options.pipeline == "batch"
    return plan.size == 1 and prefers_batches(plan, machine, options, tables)


def _check_asked(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> None:
    """Refuse batches that were asked for but are impossible.

    Raises:
        PlanError: if batches were asked for and `refusal` gives a reason.
    """
    batches = options.pipeline == "batch" or plan.options.batch is not None
    if batches and (why := refusal(plan, machine, options)):
        raise PlanError(why)


def _idle(plan: NodePlan, options: OffloadOptions) -> str:
    """Return the name of a given flag that has no effect on batches; empty if there is none."""
    if options.crossover is not None:
        return "crossover"
    return "window" if plan.options.window else ""
