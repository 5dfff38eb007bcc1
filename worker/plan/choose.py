"""The choice of the mode in which a node runs its part of a model; no other module decides it.

Each mode proposes a candidate that fits, or refuses. The candidate with the shortest forecast wins. A node calls
`choose` before it loads weights, the master before any weight moves (`check`), and `tpi plan` for its forecasts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from scheduler.model.offload.work import Workload
from tpi.errors import PlanError
from tpi.net.fields import Card
from tpi.text import short_number
from worker.node_plan import NodePlan
from worker.plan.case import Candidate, Case, Mode
from worker.plan.fit import Tables

Choose = Callable[[Case], Candidate[Any]]
"""A function that chooses a candidate for a case, as `choose` does."""


def choose(case: Case) -> Candidate[Any]:
    """Return the fastest candidate that fits, of all modes that the machine and the flags allow.

    Raises:
        PlanError: if none fits, or the options contradict each other; names the smallest setting that would suffice.
    """
    return ranked(case)[0]


def ranked(case: Case) -> list[Candidate[Any]]:
    """Return all candidates that fit, the fastest first; there is at least one.

    Raises:
        PlanError: if none fits, or the options contradict each other; names the smallest setting that would suffice.
    """
    found: list[Candidate[Any]] = []
    refused: dict[Mode, PlanError] = {}
    for mode in allowed_modes(case):
        answer = _proposal(mode, case)
        if isinstance(answer, PlanError):
            refused[mode] = answer
        elif answer is not None:
            found.append(answer)
    if not found:
        raise next(iter(refused.values()))
    best, *others = sorted(found, key=lambda each: sum(each.seconds))
    return [replace(best, remark=_remark(case, found, refused)), *others]


def _proposal(mode: Mode, case: Case) -> Candidate[Any] | PlanError | None:
    """Return the candidate that a mode proposes, or the error with which it refuses; None if it does not apply."""
    propose = import_module(f"worker.plan.modes.{mode}").propose  # not imported before: some modes are slow to import
    try:
        found: Candidate[Any] | None = propose(case)
    except PlanError as error:
        return error
    return found


def check(plan: NodePlan, tables: Tables | None = None, card: Card | None = None) -> None:
    """Refuse a plan that does not fit into the memory of a node with the accelerator `card`, or with none.

    A plan for another machine must have the options that `worker.profile.limit_options` returns.

    Raises:
        PlanError: if it does not fit; names the smallest setting that would suffice.
    """
    case = Case(plan, tables=tables, checking=True)
    if card is not None:
        from scheduler.model.machine import LAPTOP, laptop_gpu

        # Whether a plan fits does not depend on speeds: any will do.
        sizes = (card.memory, *card.more)
        first, *more = (replace(laptop_gpu(), memory=size, shared=card.shared) for size in sizes)
        machine = replace(LAPTOP, accelerator=first, more=tuple(more))
        case = replace(case, machine=machine, options=card.options)
    choose(case)


def allowed_modes(case: Case) -> Sequence[Mode]:
    """Return the modes that the machine and the flags allow. If two candidates are equally fast, the earlier mode wins.

    Raises:
        PlanError: if flags contradict each other.
    """
    plan, options = case.plan, case.options
    if (part := plan.config.host_only) and plan.options.batch is not None:
        raise PlanError(
            f"{plan.config.family} models have {part}, which micro-batches cannot compute; leave --batch out"
        )
    if case.accelerated is None:
        if plan.options.batch is not None:
            return ("batch",)
        possible: dict[Mode, bool] = {"experts": bool(plan.config.mixture), "neurons": bool(plan.predictors)}
        return [*(mode for mode, open_to in possible.items() if open_to), "stream"]
    sparsity = plan.options.sparsity if plan.predictors else "off"
    if sparsity in ("static", "dynamic"):
        from worker.plan.modes.neurons import refuse_contradicting_flags

        refuse_contradicting_flags(plan, options)
        return ("offload",) if case.held is None else ("neurons",)  # predictors come with the weights
    if plan.options.batch is not None or options.pipeline == "batch":
        return ("batch",)
    if options.pipeline == "demand":
        return ("experts",)
    modes: list[Mode] = ["batch"] if options.unattended else []
    modes.append("offload")
    if options.pipeline == "auto" and not case.checking:  # where experts on demand fit, others do too
        modes.append("experts")
    if _compares_neurons(case):
        modes.append("neurons")
    return modes


def _compares_neurons(case: Case) -> bool:
    """Return True if computing only active neurons should be compared with computing all neurons.

    The model must have predictors, `--sparsity` must be auto, and no flag may fix where weights lie.
    """
    if not case.plan.predictors or case.plan.options.sparsity != "auto":
        return False
    from worker.plan.modes.neurons import fixed_placement_flag

    return not (fixed_placement_flag(case.options) or case.options.kv_tier or case.options.unattended)


def _remark(case: Case, found: Sequence[Candidate[Any]], refused: dict[Mode, PlanError]) -> str:
    """Return a sentence for the user on the forecasts that `--sparsity auto` compared; empty if it compared none."""
    if case.accelerated is None or case.checking or not _compares_neurons(case):
        return ""
    if "neurons" in refused:
        return f"--sparsity auto computes all neurons: {str(refused['neurons']).partition(';')[0]}"
    by_mode = {each.mode: each for each in found}
    whole, active = by_mode.get("offload"), by_mode.get("neurons")
    if whole is None or active is None or whole.offload is None:
        return ""
    request = whole.offload.problem.request
    return (
        f"{request.prompt} tokens of prompt and {request.answer} of answer are predicted to take "
        f"{_times(whole, request)} with all neurons, and {_times(active, request)} with the active ones divided "
        "between CPU and accelerator; these times were not measured, because memory does not hold both plans at once"
    )


def _times(candidate: Candidate[Any], request: Workload) -> str:
    each = 1e3 * candidate.seconds[1] / request.answer
    return f"{short_number(sum(candidate.seconds))} s ({short_number(each)} ms a token)"
