"""Feed-forward blocks of which the host computes the active neurons alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from scheduler.demand.records.tier import RecordTier
from scheduler.neurons.slots import I32
from scheduler.weights import Arrangement
from tpi.devices.base import Device, Finished, Pending
from tpi.devices.pages import Bytes
from tpi.errors import TpiError
from tpi.kernels.spec import ChainBlock, FfnSpec, Residual
from worker.neurons.foresight import Scorer, scorers_of
from worker.neurons.hybrid import F32, NeuronChoice
from worker.neurons.judge import Judge
from worker.neurons.prediction import Foretell, Predictions, nobody
from worker.neurons.sent import predictors_of
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import FfnSegment, Launch, Phases, Segment, Take
from worker.plan.node_plan import NodePlan
from worker.shards.image import HeldBlock


class SparseNode:
    """What a node's sparse blocks have in common. A `scheduler.weights.StepListener`."""

    def __init__(self, scorers: Mapping[int, Scorer], judge: Judge) -> None:
        """`scorers` by layer, of all of this node's neurons of it."""
        self.judge = judge
        self.foretell: Foretell = nobody  # told of what a later layer will compute
        self.records: RecordTier | None = None  # where neurons come from disk one by one
        self._predictions = Predictions(scorers, lambda layer, choice: self.foretell(layer, choice))

    def begin(self, short: bool) -> None:
        """See `scheduler.weights.StepListener`."""
        self.judge.begin()

    def abandon(self) -> None:
        """See `scheduler.weights.StepListener`; a prediction is asked for anew by every step that uses one."""

    def describe(self) -> str:
        """What became of it, in a sentence."""
        read = "" if self.records is None else self.records.stats().describe()
        return "; ".join(filter(None, [self.judge.describe(), read]))

    def adapted(self, segment: Segment, layer: int, first: int) -> Segment:
        """A segment with a node's neurons from `first` on, which computes active ones alone; others as they are."""
        if not isinstance(segment, FfnSegment) or segment.empty:
            return segment
        return SparseFfn(segment.device, segment.launch, segment.spec, layer, first, self)

    def choose(self, layer: int, spec: FfnSpec, device: Device, part: MicroBatch) -> NeuronChoice | None:
        """What is active of a block for a micro-batch, asked once for all of its segments; None: compute all."""
        if not self.judge.predicts:
            return None
        key = (SparseNode, layer)
        if key not in part.between:
            found = self._predictions.choose(layer, spec, device, part)
            part.between[key] = Finished(lambda: found)
        chosen: NeuronChoice | None = part.between[key].wait()
        return chosen

    def measure(self, arrangement: Arrangement[Segment]) -> None:
        """Find out from which share on all neurons are faster, with a block whose weights are in memory."""
        for segments, hold in zip(arrangement.blocks, arrangement.holds, strict=True):
            for segment in segments:
                if isinstance(segment, SparseFfn) and len(segments) == 1:
                    with hold as held:
                        for _, data in held:
                            self.judge.measure(segment.device.kernels, segment.spec, data)
                    return


@dataclass(frozen=True, eq=False)
class SparseFfn:
    """A `worker.node.segment.Segment`: neurons of the host's, `first` of the node's in front of them."""

    device: Device
    launch: Launch
    spec: FfnSpec
    layer: int
    first: int
    node: SparseNode

    @property
    def empty(self) -> bool:
        """See `Segment.empty`."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; all is computed with the output."""
        if Phase.OUTPUT not in phases:
            return None
        return self.launch(lambda: self._compute(data, part, take))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`; raises TpiError, for a chain computes all neurons."""
        raise TpiError("neurons that are predicted are in no chain; run them block by block")

    def _compute(self, data: Bytes, part: MicroBatch, take: Take) -> F32:
        kernels, judge = self.device.kernels, self.node.judge
        judge.measure(kernels, self.spec, data)  # where weights stream, the first that are there
        began = perf_counter()
        chosen = self.node.choose(self.layer, self.spec, self.device, part)
        predicted = perf_counter() - began
        active = None if chosen is None else self._own(chosen.active)
        if active is None:
            found = kernels.ffn(self.spec, data, take(self))
        elif len(active):
            found = kernels.ffn(self.spec, data, part.prepared(self.spec, self.device, kernels), active)
        else:
            found = np.zeros_like(part.x)
        took = perf_counter() - began
        judge.note(took, len(part.x))
        if chosen is not None:
            count = self._neurons
            judge.note_choice(count if active is None else len(active), count, predicted, took)
        return found

    @property
    def _neurons(self) -> int:
        return self.spec.neuron.units * self.spec.neuron.width

    def _own(self, active: I32) -> I32 | None:
        """Those of the node's active neurons that lie here, by their place here; None: all are faster."""
        begin, end = np.searchsorted(active, (self.first, self.first + self._neurons))
        own = active[begin:end]
        if len(own) > self.node.judge.limit * self._neurons:
            return None
        return np.ascontiguousarray(own - np.int32(self.first)) if self.first else own


def open_sparse(plan: NodePlan, held: Sequence[HeldBlock], host: Device) -> SparseNode | None:
    """What computes active neurons alone, where the plan has predictors and `--sparsity` is not off.

    Raises:
        WeightsError: if a predictor cannot be used.
    """
    mode = plan.options.sparsity
    if mode == "off" or not plan.predictors:
        return None
    return SparseNode(scorers_of(predictors_of(plan, held), host, lambda data: data), Judge(mode))
