"""From how many tokens on a step is a long one: computed as prompts are, rather than as one token is."""

from dataclasses import replace

from scheduler.model.offload.crossover import first_from
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.tasks import Candidates, Tasks
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import Offload, StepSize

NEVER = 1 << 24  # tokens: more than any step has


def turning_point(problem: Problem, offload: Offload) -> int:
    """The smallest step, in tokens, that is faster as `offload` computes prompts; 1 where it computes all steps alike.

    `NEVER` if none is.
    """
    if offload.prompt == offload.decode:
        return 1
    work, pipeline = problem.work, offload.pipeline
    both = Candidates.of(work, [replace(offload, prompt=offload.decode), offload], "prompt")
    context = problem.step("decode")[0].context

    def pays(tokens: int) -> bool:
        step = StepSize(tokens, 1, max(context, tokens))
        tasks = Tasks.of(work, problem.machine, step, problem.exchange, offload.cards)
        as_token, as_prompt = simulate_steps(tasks, both, work.blocks, pipeline).steps.sum(axis=0).tolist()
        return bool(as_prompt < as_token)

    return first_from(pays) or NEVER
