"""Feed-forward blocks whose neurons are read from disk on demand, and computed in the slots of a cache.

Before a block is held, it says which neurons it needs: the predicted ones for a few tokens, or all neurons. If it needs
all, they pass through the memory window as tiles. Reads for predictions that look ahead start as soon as the
predictions are made.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from scheduler.demand.records.layer import RecordShelf
from scheduler.demand.records.tier import RecordTier
from scheduler.slots.table import I32
from scheduler.weights import BlockHold, Hold, Wanted
from tpi.block import Joining
from tpi.devices.base import Device, Finished, Pending
from tpi.devices.pages import Bytes
from tpi.errors import TpiError
from tpi.kernels.spec import ChainBlock, FfnSpec, Residual
from worker.neurons.hybrid import F32, NeuronChoice
from worker.neurons.sparse import SparseNode
from worker.node.block import Block
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import Launch, Phases, Segment, Take

_NOTHING: Bytes = np.zeros(0, np.uint8)


@dataclass(frozen=True, eq=False)
class DemandFfn:
    """A `worker.node.segment.Segment` of all of a node's neurons of a block, some of which are in slots.

    `spec` describes all of these neurons. `layer` is the number of the layer in the model, `number` its number among
    the layers of `tier`.
    """

    device: Device
    launch: Launch
    spec: FfnSpec
    layer: int
    number: int
    tier: RecordTier
    node: SparseNode

    @property
    def empty(self) -> bool:
        """True if this node has no neurons of the block."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the computation of the block in the output phase; do nothing in other phases.

        The weights are in slots, so `data` is not used.
        """
        if Phase.OUTPUT not in phases:
            return None
        return self.launch(lambda: self._compute(part))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Raise TpiError, because a chain of blocks cannot wait for neurons to be read."""
        raise TpiError("neurons that are read on demand cannot be part of a chain; run them block by block")

    def choose(self, part: MicroBatch) -> NeuronChoice | None:
        """Return the neurons that a micro-batch needs; None if it needs the whole block, through the window.

        The prediction for a micro-batch is made once.
        """
        found = self.node.choose(self.layer, self.spec, self.device, part)
        return found if found is not None and self.has_slots_for(len(found.active)) else None

    def has_slots_for(self, active: int) -> bool:
        """Return True if the layer has slots for `active` neurons."""
        return active <= len(self._opened.table)

    @cached_property
    def _slots(self) -> FfnSpec:
        """Description of a feed-forward network whose neurons are the slots, without biases."""
        neuron = self.spec.neuron
        units = self._opened.layer.slots // neuron.width
        return replace(self.spec, neuron=replace(neuron, units=units), gate_bias=None, up_bias=None)

    @property
    def _opened(self) -> RecordShelf:
        return self.tier.layers[self.number]

    def _spec_of(self, active: I32, slots: I32) -> FfnSpec:
        """Return the description of the slots' network, with the biases of the neurons `active` placed at their
        `slots`.
        """
        given = self.spec
        if given.gate_bias is None and given.up_bias is None:
            return self._slots
        count = self._opened.layer.slots
        gate, up = (_placed(bias, active, slots, count) for bias in (given.gate_bias, given.up_bias))
        return replace(self._slots, gate_bias=gate, up_bias=up)

    def _compute(self, part: MicroBatch) -> F32:
        began, judge, kernels = perf_counter(), self.node.judge, self.device.kernels
        chosen = self.choose(part)
        assert chosen is not None  # otherwise the window's tiles would have been held
        active = chosen.active
        if self.number == 0:
            self.tier.begin()
        if len(active):
            with self.tier.hold(self.number, active) as slots:
                x = part.prepared(self.spec, self.device, kernels)
                found = kernels.ffn(self._spec_of(active, slots), self._opened.data, x, slots)
        else:
            found = np.zeros_like(part.x)
        predicting = part.phase_results[self].wait() if self in part.phase_results else 0.0
        took = perf_counter() - began + predicting
        judge.note(took, len(part.x))
        count = self.spec.neuron.units * self.spec.neuron.width
        judge.note_choice(len(active), count, predicting, took, len(part.x))
        return found


@dataclass(frozen=True)
class PredictedBlock(Block):
    """A feed-forward block whose needed neurons are predicted before its weights are held."""

    segment: DemandFfn = field(kw_only=True)

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """Return `()` (no units of the window) if `segment` reads the predicted neurons, else None (all units)."""
        if len(parts) > 1:
            return None
        (part,) = parts
        began = perf_counter()
        chosen = self.segment.choose(part)
        took = perf_counter() - began
        part.phase_results[self.segment] = Finished(lambda: took)
        return None if chosen is None else ()


class DemandBlock:
    """A `scheduler.weights.Demanded` for one block.

    If all neurons are needed, hold the block's tiles in the window, else the block's slots.
    """

    def __init__(self, tiles: Sequence[tuple[Segment, Hold]], records: DemandFfn) -> None:
        self._tiles, self.records = tiles, records

    def wanting(self, wanted: Wanted) -> BlockHold[Segment]:
        """Return a hold of the window's tiles if `wanted` is None, else of the segment in slots."""
        return BlockHold(self._tiles if wanted is None else [(self.records, nullcontext(_NOTHING))])

    def expect(self, wanted: Wanted) -> None:
        """Do nothing: making a prediction already starts its reads."""

    def block(self, number: int, name: str, residual: Residual, sums_with_next: Joining) -> Block:
        """Return the description of this block that the block loop needs."""
        return PredictedBlock(number, name, residual, sums_with_next, segment=self.records)


def _placed(bias: F32 | None, active: I32, slots: I32, count: int) -> F32 | None:
    if bias is None:
        return None
    found = np.zeros(count, np.float32)
    found[slots] = bias[active]
    return found
