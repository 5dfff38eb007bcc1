"""Sentences with the reasons for the choice of a plan."""

from collections.abc import Iterator
from math import inf

from scheduler.model.offload.choice import OffloadChoice
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import KvTier, Pipeline, RequestPhase

_PHASES: dict[RequestPhase, str] = {"prompt": "prompts", "decode": "tokens"}
_OTHER_KV: dict[KvTier, KvTier] = {"gpu": "ram", "ram": "gpu"}
_OTHER_PIPELINE: dict[Pipeline, Pipeline] = {"performance": "memory", "memory": "performance"}
_MEMORIES: dict[KvTier, str] = {"gpu": "the GPU's memory", "ram": "RAM"}
_MUCH = 1.005  # an alternative must take at least this many times as long to be given as a reason


def reasons(problem: Problem, chosen: OffloadChoice) -> list[str]:
    """Return sentences that compare the choice with its alternatives."""
    return [*_places(problem, chosen), *_others(problem, chosen)]


def _places(problem: Problem, chosen: OffloadChoice) -> Iterator[str]:
    """Yield sentences that say where segments outside the accelerator's memory are computed."""
    if problem.machine.accelerator is None:
        yield "without an accelerator the CPU computes everything"
        return
    for phase, steps in _PHASES.items():
        rest = zip(chosen.offload.residence, chosen.offload.places(phase), strict=True)
        outside = [place for tier, place in rest if tier != "gpu"]
        there = outside.count("accelerator")
        if outside:
            here = len(outside) - there
            yield f"{steps}: of {len(outside)} segments outside the GPU, {there} go to it, the CPU computes {here}"


def _others(problem: Problem, chosen: OffloadChoice) -> Iterator[str]:
    """Yield comparisons with plans that put keys and values elsewhere, or that use the other pipeline."""
    kv, pipeline = chosen.offload.kv, chosen.offload.pipeline
    other_kv, other_pipeline = _OTHER_KV[kv], _OTHER_PIPELINE[pipeline]
    yield from _against(f"the {other_pipeline} pipeline", chosen, kv, other_pipeline)
    if problem.machine.accelerator is not None:
        yield from _against(f"keys and values in {_MEMORIES[other_kv]}", chosen, other_kv, pipeline)


def _against(what: str, chosen: OffloadChoice, kv: KvTier, pipeline: Pipeline) -> Iterator[str]:
    least = chosen.least.get((kv, pipeline), inf)
    if least == inf:
        yield f"{what} would not fit, or is ruled out"
    elif least > _MUCH * chosen.seconds:
        yield f"{what} would take at least {least / chosen.seconds:.2f} times as long"
    else:
        yield f"{what} would be no faster"
