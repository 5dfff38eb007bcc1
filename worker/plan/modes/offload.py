"""The mode for accelerators that hold some pieces of the weights, and stream the others or leave them to the host.

The cost model (`scheduler.model.offload`) chooses by predicted time.
"""

from dataclasses import replace

from scheduler.model.offload.choice import OffloadChoice, choose
from scheduler.model.offload.crossover import turning_point
from scheduler.model.offload.fitting import feasible, refusal
from tpi.devices.pages import round_up
from tpi.errors import PlanError
from worker.plan.case import Candidate, Case, layer_pages_bytes
from worker.plan.offload import MemoryRule, OffloadPlan

_DEPTH = {"performance": 2, "memory": 1}  # segments in the ring at once; as many layers' KV pages visit at once


def propose(case: Case) -> Candidate[OffloadChoice | None]:
    """Choose which pieces are resident on the accelerators, and which steps stream the others to them.

    Raises:
        PlanError: if the options do not allow a plan that fits; names the smallest setting that would suffice.
    """
    cut = case.pieces
    problem = case.problem(cut, case.rounding_bytes(cut))
    if case.checking:
        if not feasible(problem):
            raise PlanError(refusal(problem))
        return Candidate("offload", None)
    choice = choose(problem)
    chosen = choice.offload
    problem = replace(problem, cards=chosen.cards)
    dealt = chosen.cards or (0,) * len(cut)
    kept = frozenset(number for number, tier in enumerate(chosen.residence) if tier == "gpu")
    long, short = (
        frozenset(number for number, place in enumerate(places) if place == "accelerator") - kept
        for places in (chosen.prompt, chosen.decode)
    )
    planned = OffloadPlan(
        pieces=tuple(replace(piece, device=1 + card) for piece, card in zip(cut, dealt, strict=True)),
        resident=kept,
        long=long,
        short=short,
        crossover=case.options.crossover or turning_point(problem, chosen),
        kv=chosen.kv,
        depth=_DEPTH[chosen.pipeline],
        kv_layer_bytes=layer_pages_bytes(case.plan),
        problem=problem,
        chosen=chosen,
        longest=problem.tokens,
        head_bytes=round_up(problem.work.head.nbytes) if chosen.head == "gpu" else 0,
        memory=MemoryRule.of(case.options.weights),
    )
    planned = planned if problem.machine.shared else planned.deepened(problem.free_bytes)
    return Candidate("offload", choice, planned, seconds=(choice.prompt_seconds, choice.decode_seconds))
