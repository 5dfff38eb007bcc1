"""`--sparsity auto` with an accelerator: choose between all neurons, as offloading plans them, and active ones alone.

Both plans fill the accelerator's memory, so a node cannot alternate between them as on the host
(`worker.neurons.judge`). Instead the cost model compares them, with this machine's measured rates, for the request that
all accelerator plans are made for: a prompt and an answer. Both plans are assumed to compute all neurons of the prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.forecast import forecast, step_seconds
from scheduler.model.offload.problem import Problem
from scheduler.neurons.moving import STATIC
from tpi.devices.options import OffloadOptions
from tpi.errors import PlanError
from tpi.text import short_number
from worker.neurons.plan import NeuronPlan, decide_sparse, fixed_placement_flag, refuse_insistence
from worker.pipelines.decide import Decide
from worker.plan.fit import HostShare, Tables, fit
from worker.plan.node_plan import NodePlan
from worker.plan.offload import OffloadPlan
from worker.shards.image import HeldBlock

NAMED = 1.5  # most neurons that a predictor names for each active one (tpi.sparsity.training)
MIGRATING = 0.4  # share of the neurons on the accelerator above which migration does not pay (benchmark hybrid)


def decide_auto(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    machine: NodeMachine,
    options: OffloadOptions,
    tables: Tables | None,
    decide: Decide,
) -> OffloadPlan:
    """Return the accelerator's plan that `--sparsity` asks for, or the faster one with `auto`.

    Without predictors, or with `--sparsity off`, this is the plan of `decide`.

    Raises:
        PlanError: if what is asked for does not fit, or contradicts itself.
    """
    asked = plan.options.sparsity
    if not plan.predictors or asked == "off":
        return decide(plan, machine, options, tables)
    refuse_insistence(plan, options)
    if asked != "auto":
        return decide_sparse(plan, held, machine, options, tables, asked == "dynamic")
    whole = decide(plan, machine, options, tables)
    if type(whole) is not OffloadPlan or fixed_placement_flag(options) or options.kv_tier or options.many:
        return whole  # the user has chosen another way to use the accelerator
    try:
        sparse = decide_sparse(plan, held, machine, options, tables, migrate=True)
    except PlanError as error:
        return replace(whole, remark=f"--sparsity auto computes all neurons: {str(error).partition(';')[0]}")
    if not _fits(plan, held, sparse, tables):
        return replace(whole, remark="--sparsity auto computes all neurons: memory does not hold them all")
    if _share_there(sparse) > MIGRATING:
        sparse = replace(sparse, setup=replace(sparse.setup, moving=STATIC))
    all_of_them, active = seconds_of(whole.problem, whole), sparse_seconds(sparse)
    request = whole.problem.request
    said = (
        f"{request.prompt} tokens of prompt and {request.answer} of answer are predicted to take "
        f"{short_number(sum(all_of_them))} s with all neurons ({_token(whole.problem, all_of_them)}) and "
        f"{short_number(sum(active))} s with the active ones on both sides ({_token(sparse.problem, active)}): "
        "the plans do not fit beside each other, so neither was tried"
    )
    return replace(sparse if sum(active) < sum(all_of_them) else whole, remark=said)


def seconds_of(problem: Problem, plan: OffloadPlan) -> tuple[float, float]:
    """Return the expected seconds of the prompt and of the answer, with all neurons."""
    found = forecast(problem, plan.chosen)
    return found.ttft, problem.request.answer * found.decode.seconds


def sparse_seconds(plan: NeuronPlan) -> tuple[float, float]:
    """Return the expected seconds of the prompt, with all neurons on the host, and of the answer, with active ones."""
    problem = plan.problem
    prompt = forecast(problem, plan.chosen).ttft
    segments = list(problem.work.segments)
    for number, seconds in zip(_blocks(plan), ffn_seconds(plan), strict=True):
        as_bytes = int(seconds * problem.machine.host.read)  # bytes of weights that the host reads in this time
        segments[number] = replace(segments[number], nbytes=as_bytes, weights=0)
    sparse = replace(problem, work=replace(problem.work, segments=tuple(segments)))
    return prompt, problem.request.answer * step_seconds(sparse, plan.chosen, problem.step("decode")[0])


def ffn_seconds(plan: NeuronPlan) -> list[float]:
    """Return the seconds of each block of neurons: its predictor, then the slower of both sides."""
    neurons, machine = plan.neurons, plan.problem.machine
    assert machine.accelerator is not None
    found = []
    for number, layer, chosen in zip(_blocks(plan), neurons.layers, plan.placement.neurons, strict=True):
        named = np.minimum(1.0, NAMED * layer.frequency)
        there = float(named[chosen].sum())
        here = float(named.sum()) - there
        side = neurons.sync + there * layer.neuron_bytes / neurons.accelerator.bandwidth if there else 0.0
        at = plan.pieces[number].block.layer
        rates, sync = (machine.accelerator.rates, neurons.sync) if at in plan.predicted_there else (machine.host, 0.0)
        predicting = plan.setup.predictors[at].memory_bytes / rates.read + sync
        found.append(predicting + max(side, here * layer.neuron_bytes / neurons.cpu.bandwidth))
    return found


def _blocks(plan: NeuronPlan) -> list[int]:
    """Return the numbers of the pieces that are blocks of neurons."""
    return [number for number, piece in enumerate(plan.pieces) if piece.block.kind != "attention"]


def _share_there(plan: NeuronPlan) -> float:
    """Return the share of the neurons that lie on the accelerator."""
    return sum(map(len, plan.placement.neurons)) / sum(len(layer.frequency) for layer in plan.neurons.layers)


def _token(problem: Problem, seconds: tuple[float, float]) -> str:
    return f"{short_number(1e3 * seconds[1] / problem.request.answer)} ms a token"


def _fits(plan: NodePlan, held: Sequence[HeldBlock], sparse: NeuronPlan, tables: Tables | None) -> bool:
    """Return True if the host's memory holds all neurons."""
    pieces = [replace(sparse.pieces[number], device=0) for number in sparse.host_pieces]
    hosted = HostShare.of(pieces, [piece.extent(held).slot_bytes for piece in pieces], len(sparse.home), 0)
    try:
        return not fit(plan, tables, hosted).placement.streamed_bytes
    except PlanError:
        return False
