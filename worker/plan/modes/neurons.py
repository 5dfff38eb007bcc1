"""The mode that computes only the neurons predicted to be active.

Neurons that are often active lie on an accelerator. Without one, active neurons are read from disk when needed.

With an accelerator, attention takes its memory first, since every token uses attention whole. The rest is for
predictors and the neurons' arena; the integer program of `scheduler.model.neurons` chooses which neurons and predictors
lie there. The host's memory holds all feed-forward weights and all predictors.

With `--sparsity auto`, the cost model compares this mode with the modes that compute all neurons. It uses this
machine's measured rates and the request for which all candidates are made. Both modes fill the accelerator's memory, so
a node cannot alternate between them as on the host (`worker.neurons.judge`). All neurons of a prompt are assumed to be
computed.

Without an accelerator, `worker.plan.records` plans neurons that are read from disk one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scheduler.model.machine import NodeMachine
from scheduler.model.neurons.problem import LayerNeurons, NeuronProblem
from scheduler.model.neurons.solve import NeuronPlacement, place_neurons
from scheduler.model.offload.forecast import forecast, step_seconds
from scheduler.model.offload.work import KvTier, Offload, Place, Tier
from scheduler.neurons.migration import DYNAMIC, STATIC, MigrationSettings
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import round_up
from tpi.errors import PlanError
from tpi.sparsity.predictor import Predictor
from worker.node_plan import NodePlan
from worker.plan.case import Candidate, Case, layer_pages_bytes
from worker.plan.offload import MemoryRule, OffloadPlan
from worker.plan.predictors import NAMED, frequencies_of, predictors_of
from worker.plan.records import RecordPlan, read_by_neuron
from worker.plan.segments import NodeSegment, whole_blocks

if TYPE_CHECKING:
    from worker.neurons.lookahead import Scorer

F64 = npt.NDArray[np.float64]
MIGRATING = 0.4  # share of the neurons on the accelerator above which migration does not pay (benchmark hybrid)
_SOLVING = 10.0  # time limit of the integer program, in seconds


@dataclass(frozen=True, eq=False)
class NeuronSetup:
    """A node's neurons by layer, and how they may use the accelerator.

    Attributes:
        frequency: how often each of this node's neurons is active, `[neurons]` from 0 to 1.
        predictors: their predictors; the placement chooses which lie on the accelerator.
        scorers: scorers that replace `predictors` in their layers, for tests.
        migration: the settings of neuron migration.
        max_bytes: bytes of the accelerator's memory that neurons and predictors may take; None for all that is left.
    """

    frequency: Mapping[int, F64]
    predictors: Mapping[int, Predictor] = field(default_factory=dict)
    scorers: "Mapping[int, Scorer]" = field(default_factory=dict)
    migration: MigrationSettings = DYNAMIC
    max_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class NeuronArenas:
    """The neurons of feed-forward blocks that lie on the accelerator. The host's memory holds all neurons."""

    setup: NeuronSetup
    neurons: NeuronProblem  # the problem that `placement` solves; it has one layer for each block of neurons
    placement: NeuronPlacement
    predictors_on_accelerator: frozenset[
        int
    ]  # the layers whose predictors lie on the accelerator; the host has the others

    @property
    def share_on_accelerator(self) -> float:
        """The share of the neurons that lie on the accelerator."""
        return sum(map(len, self.placement.neurons)) / sum(len(layer.frequency) for layer in self.neurons.layers)


def propose(case: Case) -> Candidate[NeuronArenas] | Candidate[RecordPlan] | None:
    """Return a candidate that computes active neurons alone, or None if the model has no predictors.

    Raises:
        PlanError: if attention does not fit on the accelerator, a block cannot be computed neuron by neuron, or
            memory does not hold all neurons.
        WeightsError: if a predictor cannot be used.
    """
    plan, held = case.plan, case.held
    if not plan.predictors or held is None:
        return None
    if case.accelerated is None:
        return read_by_neuron(case)
    predictors = predictors_of(plan, held)
    ahead = max((predictor.ahead for predictor in predictors.values()), default=0)
    moving = STATIC if plan.options.sparsity == "static" else replace(DYNAMIC, ahead=max(1, ahead))
    found = plan_on_accelerator(case, NeuronSetup(frequencies_of(plan, held), predictors, migration=moving))
    if (offload := found.offload) is None or plan.options.sparsity != "auto":
        return found
    if not case.in_memory(offload):
        raise PlanError("memory does not hold all neurons; give more --memory")
    if found.details.share_on_accelerator > MIGRATING:
        setup = replace(found.details.setup, migration=STATIC)
        found = replace(found, details=replace(found.details, setup=setup))
    return replace(found, seconds=_seconds(offload, found.details))


def plan_on_accelerator(case: Case, setup: NeuronSetup) -> Candidate[NeuronArenas]:
    """Return the plan that puts attention, and as many neurons of `setup` as fit, on the accelerator of `case`.

    Raises:
        PlanError: if attention does not fit on the accelerator, or a block has no predictors or is not stored as
            records of neurons.
    """
    pieces = tuple(replace(piece, device=1) for piece in whole_blocks(case.plan))
    _check(pieces, setup)
    assert case.machine is not None
    problem = case.problem(pieces)
    attention = frozenset(number for number, piece in enumerate(pieces) if piece.block.kind == "attention")
    tiers: tuple[Tier, ...] = tuple("gpu" if number in attention else "ram" for number in range(len(pieces)))
    places: tuple[Place, ...] = tuple("accelerator" if tier == "gpu" else "host" for tier in tiers)
    kv: KvTier = case.options.kv_tier or "gpu"
    offload = OffloadPlan(
        pieces=pieces,
        resident=attention,
        long=frozenset(),
        short=frozenset(),
        crossover=1,
        kv=kv,
        depth=1,
        kv_layer_bytes=layer_pages_bytes(case.plan),
        problem=problem,
        chosen=Offload(tiers, places, places, kv, "memory"),
        longest=problem.tokens,
        memory=MemoryRule(
            True,
            f"--sparsity {'dynamic' if setup.migration.migrate else 'static'} with an accelerator keeps all neurons "
            "in memory",
            "give more --memory, or add --sparsity off",
        ),
    )
    room = problem.free_bytes[0] - offload.memory_bytes
    if room < 0:
        raise PlanError(
            f"the accelerator lacks {-(room >> 20)}MiB for attention, which must fit before any neurons; give it more "
            "with --gpu-memory, or add --sparsity off"
        )
    neurons = _neurons(pieces, case.machine, setup, min(room, setup.max_bytes or room))
    placement = place_neurons(neurons, _SOLVING)
    layers = zip((piece.block.layer for piece in neuron_blocks(pieces)), placement.predictors, strict=True)
    predicted = frozenset(layer for layer, there in layers if there and layer in setup.predictors)
    return Candidate("neurons", NeuronArenas(setup, neurons, placement, predicted), offload)


def fixed_placement_flag(options: OffloadOptions) -> str:
    """Return the flag that fixes where weights lie or how steps are computed, with its value.

    Return an empty string if no such flag is given.
    """
    if options.weights_tier:
        return f"--weights {options.weights}"
    if options.pipeline != "auto":
        return f"--pipeline {options.pipeline}"
    return "" if options.crossover is None else f"--crossover {options.crossover}"


def refuse_contradicting_flags(plan: NodePlan, options: OffloadOptions) -> None:
    """Raise a PlanError if `--sparsity static` or `dynamic` is combined with a flag that fixes where weights lie."""
    asked, flag = plan.options.sparsity, fixed_placement_flag(options)
    if flag and plan.predictors and asked in ("static", "dynamic"):
        raise PlanError(
            f"--sparsity {asked} cannot be combined with {flag}: it decides itself what lies on the accelerator and "
            f"what the CPU computes; remove {flag.split()[0]} or --sparsity"
        )


def neuron_blocks(pieces: Sequence[NodeSegment]) -> list[NodeSegment]:
    """Return the pieces that are blocks of neurons, in order of use."""
    return [piece for piece in pieces if piece.block.kind != "attention"]


def placed_bytes(predictor: Predictor) -> int:
    """Return the bytes that a predictor takes on an accelerator: two matrices, each rounded up to whole pages."""
    return sum(round_up(matrix.run.units * matrix.run.unit_bytes) for matrix in (predictor.first, predictor.second))


def _seconds(offload: OffloadPlan, arenas: NeuronArenas) -> tuple[float, float]:
    """Return the expected seconds of the request's prompt, and those of its answer.

    For the prompt, the host computes all neurons. For the answer, both sides compute only active neurons.
    """
    problem = offload.problem
    prompt = forecast(problem, offload.chosen).ttft
    segments = list(problem.work.segments)
    blocks = [number for number, piece in enumerate(offload.pieces) if piece.block.kind != "attention"]
    for number, seconds in zip(blocks, ffn_seconds(offload, arenas), strict=True):
        # the cost model knows bytes only: a block counts as the weights that the host reads in its time
        as_bytes = int(seconds * problem.machine.host.read)
        segments[number] = replace(segments[number], nbytes=as_bytes, weights=0)
    sparse = replace(problem, work=replace(problem.work, segments=tuple(segments)))
    return prompt, problem.request.answer * step_seconds(sparse, offload.chosen, problem.step("decode")[0])


def ffn_seconds(offload: OffloadPlan, arenas: NeuronArenas) -> Iterator[float]:
    """Yield the expected seconds of each block of neurons for one token, in order of use.

    They are the time of the block's predictor, and then the time of the slower side, accelerator or CPU.
    """
    neurons, machine, setup = arenas.neurons, offload.problem.machine, arenas.setup
    assert machine.accelerator is not None
    blocks = zip(neuron_blocks(offload.pieces), neurons.layers, arenas.placement.neurons, strict=True)
    for piece, layer, chosen in blocks:
        named = np.minimum(1.0, NAMED * layer.frequency)
        there = float(named[chosen].sum())
        here = float(named.sum()) - there
        side = neurons.sync + there * layer.neuron_bytes / neurons.accelerator.bandwidth if there else 0.0
        at = piece.block.layer
        rates, sync = (
            (machine.accelerator.rates, neurons.sync) if at in arenas.predictors_on_accelerator else (machine.host, 0.0)
        )
        predicting = setup.predictors[at].memory_bytes / rates.read + sync
        yield predicting + max(side, here * layer.neuron_bytes / neurons.cpu.bandwidth)


def _check(pieces: tuple[NodeSegment, ...], setup: NeuronSetup) -> None:
    for piece in neuron_blocks(pieces):
        if piece.block.layer not in setup.frequency:
            raise PlanError(
                f"{piece.block.name} has no predictors; run `tpi profile --predictors`, or add --sparsity off"
            )
        for run in piece.runs:
            if run.name != "neuron" or run.layout.layout != "record":
                raise PlanError(
                    f"{piece.block.name} is not stored as records of neurons, so single neurons cannot be chosen; "
                    "give --sparsity off"
                )


def _neurons(pieces: tuple[NodeSegment, ...], machine: NodeMachine, setup: NeuronSetup, room: int) -> NeuronProblem:
    layers = [_layer(setup, piece) for piece in neuron_blocks(pieces)]
    assert machine.accelerator is not None  # there is one to decide about
    rooms = replace(machine, accelerator=replace(machine.accelerator, memory=room))
    return NeuronProblem.of(layers, rooms)


def _layer(setup: NeuronSetup, piece: NodeSegment) -> LayerNeurons:
    layer, predictor = piece.block.layer, setup.predictors.get(piece.block.layer)
    nbytes = 0 if predictor is None else placed_bytes(predictor)
    return LayerNeurons(setup.frequency[layer], piece.runs[0].layout.record_bytes, nbytes)
