"""The mode for a host without accelerators: weights stay in memory, and weights that do not fit are read in a cycle."""

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from worker.plan.case import Candidate, Case, Mode

if TYPE_CHECKING:
    from scheduler.model.offload.choice import OffloadChoice


def propose(case: Case) -> "Candidate[None] | Candidate[OffloadChoice]":
    """Return the candidate that streams weights in a cycle. It is chosen only if no other candidate fits.

    Every other candidate reads less from disk and so is faster. If the weights are not on the node yet, the cost model
    predicts this candidate's time on the machine of `case`.

    Raises:
        PlanError: if not even the smallest ring fits; names the memory that would suffice.
    """
    if case.held is None and case.machine is not None and not case.checking:
        from scheduler.model.offload.choice import choose

        choice = choose(case.problem(case.pieces, case.rounding_bytes(case.pieces)))
        return Candidate("stream", choice, seconds=(choice.prompt_seconds, choice.decode_seconds))
    return replace(on_the_host(case, "stream"), seconds=(inf, inf))


def on_the_host(case: Case, mode: Mode) -> Candidate[None]:
    """Return the candidate of `mode` that uses only the host: its memory holds all weights, or streams them in a cycle.

    Raises:
        PlanError: if not even the smallest ring fits; names the memory that would suffice.
    """
    budget, speed = case.host_budget
    if case.held is None:
        return Candidate(mode, None)
    return Candidate(mode, None, window=case.window(case.host_part(None)[0], budget, speed)[0])
