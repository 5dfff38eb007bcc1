"""The number of tokens from which the accelerator is faster: for a streamed segment, and for a whole step."""

from collections.abc import Callable
from dataclasses import replace

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.tasks import Candidates, Tasks
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import PLACES, NodeWork, Offload, Pipeline, SegmentWork, StepSize, Tier

MOST_TOKENS = 1 << 16
NEVER = 1 << 24  # tokens: more than any step has
_BLOCKS = 4  # equal blocks in a row, so that loads and computing can overlap
_STEPS = 3  # steps simulated; the last one counts
_BEATS = 1 - 1e-6  # the accelerator is faster if it takes less than this share of the host's time


def crossover(
    segment: SegmentWork, machine: NodeMachine, tier: Tier, pipeline: Pipeline = "performance", crossing: int = 0
) -> int | None:
    """Return the smallest number of tokens from which the accelerator is faster for a segment in RAM or on disk.

    Keys and values are assumed to be on the device that uses them, so only weights and hidden states are moved. The
    time of each device is constant while it reads for longer than it computes, and grows linearly from there on. So
    there is at most one such number if the accelerator is the faster device; it is found by bisection.

    Args:
        segment: the segment.
        machine: the node.
        tier: where the segment is stored.
        pipeline: the pipeline.
        crossing: bytes of a token's hidden states, one way.

    Returns:
        The number; None if there is none up to `MOST_TOKENS`, or no accelerator.
    """
    if machine.accelerator is None:
        return None
    alone = replace(segment, kv_token=0, pair=0)
    work = NodeWork(tuple(replace(alone, block=number) for number in range(_BLOCKS)), crossing)
    both = [Offload((tier,) * _BLOCKS, (place,) * _BLOCKS, (place,) * _BLOCKS, "ram", pipeline) for place in PLACES]
    candidates = Candidates.of(work, both, "prompt")

    def beats(tokens: int) -> bool:
        tasks = Tasks.of(work, machine, StepSize(tokens, 1, tokens))
        host, accelerator = simulate_steps(tasks, candidates, work.blocks, pipeline, _STEPS).steps[-1].tolist()
        return bool(accelerator < _BEATS * host)

    return first_from(beats)


def first_from(holds: Callable[[int], bool]) -> int | None:
    """Return the smallest number from which `holds` is true; None if it is false up to `MOST_TOKENS`.

    Once true for a number, `holds` must be true for all larger ones.
    """
    if not holds(MOST_TOKENS):
        return None
    never, always = 0, MOST_TOKENS
    while always - never > 1:
        middle = (never + always) // 2
        never, always = (never, middle) if holds(middle) else (middle, always)
    return always


def turning_point(problem: Problem, offload: Offload) -> int:
    """Return the fewest tokens of a step from which computing it like a prompt is faster than like a decode step.

    `offload` says how prompts and decode steps are computed. 1 means that it computes both alike, `NEVER` that
    computing like a prompt is never faster.
    """
    if offload.prompt == offload.decode:
        return 1
    work, pipeline = problem.work, offload.pipeline
    both = Candidates.of(work, [replace(offload, prompt=offload.decode), offload], "prompt")
    context = problem.step("decode")[0].context

    def pays(tokens: int) -> bool:
        step = StepSize(tokens, 1, max(context, tokens))
        tasks = problem.tasks(step, offload.cards)
        as_token, as_prompt = simulate_steps(tasks, both, work.blocks, pipeline).steps.sum(axis=0).tolist()
        return bool(as_prompt < as_token)

    return first_from(pays) or NEVER
