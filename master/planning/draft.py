"""The memory of a draft model in a plan, counted as a run counts it (`master.deployment.draft`)."""

from pathlib import Path

from master.deployment.draft import DTYPE, NO_EFFECT, refuse_recurrent, refuse_streamed
from master.options import DEFAULT_CONTEXT
from master.planning.problem import planning_case
from master.planning.shapes import ModelShape, model_shape
from scheduler.model.machine import NodeMachine
from scheduler.model.offload.work import Workload
from tpi.errors import PlanError, UsageError
from tpi.progress import note
from worker.plan.fit import fit


def draft_bytes(draft: str, cache: Path, machine: NodeMachine, context: int | None) -> int:
    """Return, and print, the bytes of the draft model in the memory of `machine`, the master's.

    Args:
        draft: the model's name, as for `tpi run --draft`. No weights are read.
        cache: the directory of packs.
        machine: the master's machine; the memory left by the draft model is for its part of the large model.
        context: tokens of context; None: as for `tpi run`.

    Raises:
        ModelError: if the draft model does not exist, or its architecture is not supported.
        PlanError: if the draft model does not fit into the memory as a whole.
        UsageError: if it has recurrent layers.
    """
    shape = model_shape(draft, DTYPE, cache, machine.memory)
    refuse_recurrent(draft, shape.config)
    tokens = min(context or DEFAULT_CONTEXT, shape.config.context)
    case = planning_case(shape, machine, Workload(context=tokens))
    try:
        budget = fit(case.plan, case.tables)
    except PlanError as error:
        raise PlanError(f"--draft {draft}: {error}", error.node) from error
    refuse_streamed(draft, budget)
    note(f"the draft model takes {budget.used >> 20} MiB of this node's memory")
    return budget.used


def refuse_draft(shape: ModelShape, accelerated: bool, reads: bool) -> None:
    """Refuse drafts where a run has none: with an accelerator, and for experts that are read from disk.

    Args:
        shape: the large model.
        accelerated: whether an accelerator takes part.
        reads: whether a node reads weights from its disk for each token.

    Raises:
        UsageError: if a run would refuse `--draft`.
    """
    if accelerated or (reads and shape.config.mixture is not None):
        raise UsageError(NO_EFFECT)
