"""Which plan a node's accelerator gets: for batches, or for requests one by one, with experts on demand or without."""

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
"""See `decide_accelerator`."""


def decide_accelerator(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> OffloadPlan:
    """What goes where on `machine`, whose accelerator has the memory that is left for this.

    Raises:
        PlanError: if what the options ask for does not fit.
    """
    _check_asked(plan, machine, options)
    if _batches(plan, machine, options, tables):
        return decide_batch(plan, machine, options, tables)
    return decide_experts(plan, machine, options, tables) or decide_offload(plan, machine, options, tables)


def check_accelerator(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None = None
) -> None:
    """Before any weight moves: whether anything fits on `machine` that `options` allow. Errors as above."""
    _check_asked(plan, machine, options)
    refuse_insistence(plan, options)
    if _batches(plan, machine, options, tables):
        decide_batch(plan, machine, options, tables)
    elif options.pipeline == "demand":
        decide_experts(plan, machine, options, tables)
    else:
        check_offload(plan, machine, options, tables)


def refusal(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> str:
    """Why a node with an accelerator does not compute batches, and the way out; empty where it may."""
    if why := several_cards(machine):
        return why
    if flag := _idle(plan, options):
        return (
            f"--pipeline batch takes every step to the accelerator, layer by layer, and --{flag} counts for nothing; "
            "leave that out, or --pipeline batch"
        )
    return ""


def several_cards(machine: NodeMachine) -> str:
    """Return why a node with several accelerators computes no micro-batches; empty where it has one or none."""
    if not machine.more:
        return ""
    return "--pipeline batch computes on one accelerator, and several are named; give --device once"


def leaves_open(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> bool:
    """Whether batches may be chosen where nobody asks for them."""
    return options.pipeline == "auto" and not refusal(plan, machine, options)


def _batches(plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None) -> bool:
    """Whether the master says so, or it is asked for; or left open, by who has many requests, and worth it."""
    if plan.options.batch is not None:
        return True
    if not options.many or not leaves_open(plan, machine, options):
        return options.pipeline == "batch"
    return plan.size == 1 and prefers_batches(plan, machine, options, tables)


def _check_asked(plan: NodePlan, machine: NodeMachine, options: OffloadOptions) -> None:
    """Whether it may batch, if it is to."""
    batches = options.pipeline == "batch" or plan.options.batch is not None
    if batches and (why := refusal(plan, machine, options)):
        raise PlanError(why)


def _idle(plan: NodePlan, options: OffloadOptions) -> str:
    """A flag that was given and that batches do not follow."""
    if options.crossover is not None:
        return "crossover"
    return "window" if plan.options.window else ""
