"""The mode for a host without accelerators: weights stay in memory, or those that do not fit are read in a cycle."""

from dataclasses import replace
from math import inf

from worker.plan.case import Candidate, Case, Mode


def propose(case: Case) -> Candidate[None]:
    """Return the candidate of last resort: every other one that fits reads less from disk, and so is faster.

    Raises:
        PlanError: if not even the smallest ring fits; names the memory that would suffice.
    """
    return replace(on_the_host(case, "stream"), seconds=(inf, inf))


def on_the_host(case: Case, mode: Mode) -> Candidate[None]:
    """Return the candidate of `mode` with all weights in the host's memory, or streamed through it in a cycle.

    Raises:
        PlanError: if not even the smallest ring fits; names the memory that would suffice.
    """
    budget, speed = case.host
    if case.held is None:
        return Candidate(mode, None)
    return Candidate(mode, None, window=case.window(case.hosted(None)[0], budget, speed)[0])
