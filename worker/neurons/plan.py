"""The plan for an accelerator's memory if each token chooses its neurons: attention first, then hot neurons.

Every token uses attention whole, so it comes first. The rest of the accelerator's memory is for predictors and the
neurons' arena; the integer program of `scheduler.model.neurons` chooses which of them lie there. The host's memory
holds all feed-forward weights and all predictors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from scheduler.model.machine import NodeMachine
from scheduler.model.neurons.problem import LayerNeurons, NeuronProblem
from scheduler.model.neurons.solve import NeuronPlacement, place_neurons
from scheduler.model.offload.work import KvTier, Offload, Place, Tier
from scheduler.model.placement import Placement
from scheduler.neurons.moving import DYNAMIC, STATIC, MigrationSettings
from tpi.devices.options import OffloadOptions
from tpi.devices.pages import round_up
from tpi.errors import PlanError
from tpi.sparsity.predictor import Predictor
from worker.neurons.foresight import Scorer
from worker.neurons.sent import frequencies_of, predictors_of
from worker.plan.fit import Tables
from worker.plan.node_plan import NodePlan
from worker.plan.offload import OffloadPlan, layer_pages_bytes, offload_problem
from worker.plan.segments import NodeSegment, whole_blocks
from worker.shards.image import HeldBlock

F64 = npt.NDArray[np.float64]
_SOLVING = 10.0  # time limit of the integer program, in seconds


@dataclass(frozen=True, eq=False)
class NeuronSetup:
    """A node's neurons by layer, and how they may use the accelerator.

    Attributes:
        frequency: how often each of this node's neurons is active, `[neurons]` from 0 to 1.
        predictors: their predictors; the placement chooses which lie on the accelerator.
        scorers: scorers that replace `predictors` in their layers, for tests.
        moving: the settings of neuron migration.
        most: bytes of the accelerator's memory that neurons and predictors may take; None for all that is left.
    """

    frequency: Mapping[int, F64]
    predictors: Mapping[int, Predictor] = field(default_factory=dict)
    scorers: Mapping[int, Scorer] = field(default_factory=dict)
    moving: MigrationSettings = DYNAMIC
    most: int | None = None


@dataclass(frozen=True)
class NeuronPlan(OffloadPlan):
    """The plan: feed-forward blocks lie on the host, and some of their neurons, by `placement`, also in an arena."""

    setup: NeuronSetup = field(kw_only=True)
    neurons: NeuronProblem = field(kw_only=True)  # solved by the placement; one layer per block of neurons
    placement: NeuronPlacement = field(kw_only=True)

    @property
    def predicted_there(self) -> frozenset[int]:
        """The layers whose predictors lie on the accelerator; the host has the others."""
        layers = [piece.block.layer for piece in neuron_blocks(self.pieces)]
        kept = zip(layers, self.placement.predictors, strict=True)
        return frozenset(layer for layer, there in kept if there and layer in self.setup.predictors)

    def below(self, sizes: Sequence[int], fitting: Placement) -> Placement:
        """Return the placement below the accelerator, as `OffloadPlan.below` does, if nothing streams.

        Raises:
            PlanError: if the host's memory does not hold all neurons.
        """
        if fitting.streamed_bytes:
            raise PlanError(
                f"--sparsity {'dynamic' if self.setup.moving.migrate else 'static'} beside an accelerator keeps all "
                f"neurons in memory, and {-(-fitting.streamed_bytes >> 20)}MiB of them do not fit; give more --memory, "
                "or leave --sparsity off"
            )
        return super().below(sizes, fitting)


def decide_sparse(
    plan: NodePlan,
    held: Sequence[HeldBlock],
    machine: NodeMachine,
    options: OffloadOptions,
    tables: Tables | None,
    migrate: bool,
) -> NeuronPlan:
    """Plan neurons on both sides with the predictors of `plan`; they move at run time if `migrate` is True.

    Raises:
        PlanError: as `decide_neurons`.
        WeightsError: if a predictor cannot be used.
    """
    predictors = predictors_of(plan, held)
    ahead = max((predictor.ahead for predictor in predictors.values()), default=0)
    moving = replace(DYNAMIC, ahead=max(1, ahead)) if migrate else STATIC
    return decide_neurons(
        plan, machine, options, tables, NeuronSetup(frequencies_of(plan, held), predictors, moving=moving)
    )


def decide_neurons(
    plan: NodePlan, machine: NodeMachine, options: OffloadOptions, tables: Tables | None, setup: NeuronSetup
) -> NeuronPlan:
    """Plan attention and neurons on `machine`, whose `accelerator.memory` is the memory available to them.

    Raises:
        PlanError: if attention does not fit on the accelerator, or a block has no predictors or is not stored as
            records of neurons.
    """
    pieces = tuple(replace(piece, device=1) for piece in whole_blocks(plan))
    _check(pieces, setup)
    problem = offload_problem(plan, pieces, machine, options, tables)
    attention = frozenset(number for number, piece in enumerate(pieces) if piece.block.kind == "attention")
    tiers: tuple[Tier, ...] = tuple("gpu" if number in attention else "ram" for number in range(len(pieces)))
    places: tuple[Place, ...] = tuple("accelerator" if tier == "gpu" else "host" for tier in tiers)
    kv: KvTier = options.kv_tier or "gpu"
    planned = OffloadPlan(
        pieces, attention, frozenset(), frozenset(), 1, kv, 1, layer_pages_bytes(plan), problem,
        Offload(tiers, places, places, kv, "memory"), in_ram=True,
    )  # fmt: skip
    room = problem.rooms[0] - planned.memory_bytes
    if room < 0:
        raise PlanError(
            f"the accelerator lacks {-(room >> 20)}MiB for attention, beside which neurons could lie there; give it "
            "more with --gpu-memory, or leave --sparsity off"
        )
    fields = {name: getattr(planned, name) for name in OffloadPlan.__dataclass_fields__}
    neurons = _neurons(pieces, machine, setup, min(room, setup.most or room))
    return NeuronPlan(**fields, setup=setup, neurons=neurons, placement=place_neurons(neurons, _SOLVING))


def fixed_placement_flag(options: OffloadOptions) -> str:
    """Return the flag that fixes where weights lie or how steps are computed, with its value; empty if none does."""
    if options.weights_tier:
        return f"--weights {options.weights}"
    if options.pipeline != "auto":
        return f"--pipeline {options.pipeline}"
    return "" if options.crossover is None else f"--crossover {options.crossover}"


def refuse_insistence(plan: NodePlan, options: OffloadOptions) -> None:
    """Raise a PlanError if `--sparsity static` or `dynamic` is combined with a flag that fixes where weights lie."""
    asked, flag = plan.options.sparsity, fixed_placement_flag(options)
    if flag and plan.predictors and asked in ("static", "dynamic"):
        raise PlanError(
            f"--sparsity {asked} cannot be combined with {flag}: it decides itself what lies on the accelerator and "
            f"what each side computes; remove {flag.split()[0]} or --sparsity"
        )


def neuron_blocks(pieces: Sequence[NodeSegment]) -> list[NodeSegment]:
    """Return the pieces that are blocks of neurons, in order of use."""
    return [piece for piece in pieces if piece.block.kind != "attention"]


def placed_bytes(predictor: Predictor) -> int:
    """Return the bytes that a predictor takes on an accelerator: two matrices, each rounded up to whole pages."""
    return sum(round_up(matrix.run.units * matrix.run.unit_bytes) for matrix in (predictor.first, predictor.second))


def _check(pieces: tuple[NodeSegment, ...], setup: NeuronSetup) -> None:
    for piece in neuron_blocks(pieces):
        if piece.block.layer not in setup.frequency:
            raise PlanError(f"{piece.block.name} has no predictors; make them again, or leave --sparsity off")
        for run in piece.runs:
            if run.name != "neuron" or run.layout.layout != "record":
                raise PlanError(
                    f"{piece.block.name} is not stored as records of neurons, so they cannot be chosen one by one; "
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
