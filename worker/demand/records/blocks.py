"""Feed-forward blocks whose neurons are read when a token wants them, and computed by slot.

A block is asked what it wants before it is held: the neurons that are predicted for a few tokens, or all of them. All
pass through the window, as tiles. Predictions that look ahead have their reads begun as soon as they are made.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from scheduler.demand.records.layer import OpenLayer
from scheduler.demand.records.table import I32
from scheduler.demand.records.tier import RecordTier
from scheduler.weights import BlockHold, Hold, Wanted
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
class RecordFfn:
    """A `worker.node.segment.Segment`: all of a node's neurons of a block, of which some are in slots.

    `spec` is of all of them; `number` is the layer's among those of `tier`.
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
        """See `Segment.empty`."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; all is computed with the output, of slots: `data` is nothing."""
        if Phase.OUTPUT not in phases:
            return None
        return self.launch(lambda: self._compute(part))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`; raises TpiError, for a chain waits for nothing."""
        raise TpiError("neurons that come when they are wanted are in no chain; run them block by block")

    def chosen(self, part: MicroBatch) -> NeuronChoice | None:
        """What a micro-batch wants of the block, asked once; None: all of it, which passes through the window."""
        found = self.node.choose(self.layer, self.spec, self.device, part)
        return found if found is not None and self.takes(len(found.active)) else None

    def takes(self, active: int) -> bool:
        """Whether there are slots for so many; what the window would read of the block is more than they lack."""
        return active <= len(self._opened.table)

    @cached_property
    def _slots(self) -> FfnSpec:
        """The slots as a run of their own, without biases."""
        neuron = self.spec.neuron
        units = self._opened.layer.slots // neuron.width
        return replace(self.spec, neuron=replace(neuron, units=units), gate_bias=None, up_bias=None)

    @property
    def _opened(self) -> OpenLayer:
        return self.tier.layers[self.number]

    def _spec_of(self, active: I32, slots: I32) -> FfnSpec:
        """With the biases where their neurons lie now."""
        given = self.spec
        if given.gate_bias is None and given.up_bias is None:
            return self._slots
        count = self._opened.layer.slots
        gate, up = (_placed(bias, active, slots, count) for bias in (given.gate_bias, given.up_bias))
        return replace(self._slots, gate_bias=gate, up_bias=up)

    def _compute(self, part: MicroBatch) -> F32:
        began, judge, kernels = perf_counter(), self.node.judge, self.device.kernels
        chosen = self.chosen(part)
        assert chosen is not None  # or the window's tiles were held
        active = chosen.active
        if self.number == 0:
            self.tier.begin()
        if len(active):
            with self.tier.hold(self.number, active) as slots:
                x = part.prepared(self.spec, self.device, kernels)
                found = kernels.ffn(self._spec_of(active, slots), self._opened.data, x, slots)
        else:
            found = np.zeros_like(part.x)
        predicting = part.between[self].wait() if self in part.between else 0.0
        took = perf_counter() - began + predicting
        judge.note(took, len(part.x))
        count = self.spec.neuron.units * self.spec.neuron.width
        judge.note_choice(len(active), count, predicting, took, len(part.x))
        return found


@dataclass(frozen=True)
class PredictedBlock(Block):
    """A feed-forward block that is asked what it wants before it is held."""

    segment: RecordFfn = field(kw_only=True)

    def wanted(self, parts: Sequence[MicroBatch]) -> Wanted:
        """Nothing of the window where `segment` reads what is predicted; else all of it."""
        if len(parts) > 1:
            return None
        (part,) = parts
        began = perf_counter()
        chosen = self.segment.chosen(part)
        took = perf_counter() - began
        part.between[self.segment] = Finished(lambda: took)
        return None if chosen is None else ()


class StreamedBlock:
    """A `scheduler.weights.Demanded`: the window's tiles where all is wanted, else the segment that has slots."""

    def __init__(self, tiles: Sequence[tuple[Segment, Hold]], records: RecordFfn) -> None:
        self._tiles, self.records = tiles, records

    def wanting(self, wanted: Wanted) -> BlockHold[Segment]:
        """See `scheduler.weights.Demanded`."""
        return BlockHold(self._tiles if wanted is None else [(self.records, nullcontext(_NOTHING))])

    def expect(self, wanted: Wanted) -> None:
        """See `scheduler.weights.Demanded`; whoever predicts tells the tier."""

    def block(self, number: int, name: str, residual: Residual, joins: bool) -> Block:
        """As the block loop knows it."""
        return PredictedBlock(number, name, residual, joins, segment=self.records)


def _placed(bias: F32 | None, active: I32, slots: I32, count: int) -> F32 | None:
    if bias is None:
        return None
    found = np.zeros(count, np.float32)
    found[slots] = bias[active]
    return found
