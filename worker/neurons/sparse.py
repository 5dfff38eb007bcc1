"""Feed-forward blocks on the host that compute only their active neurons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from scheduler.demand.records.tier import RecordTier
from scheduler.slots.table import I32
from scheduler.weights import Arrangement
from tpi.devices.base import Device, Finished, Pending
from tpi.devices.pages import Bytes
from tpi.errors import TpiError
from tpi.kernels.spec import ChainBlock, FfnSpec, Residual
from worker.neurons.forecast import SparsityForecast, measure_forecast
from worker.neurons.hybrid import F32, NeuronChoice
from worker.neurons.judge import SparsityJudge
from worker.neurons.lookahead import PlacedPredictor, Scorer, stay
from worker.neurons.prediction import OnPrediction, Predictions, ignore_prediction
from worker.neurons.union import PIECE, union_of
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import FfnSegment, Launch, Phases, Segment, Take
from worker.node_plan import NodePlan
from worker.plan.predictors import NAMED, frequencies_of, predictors_of
from worker.shards.image import HeldBlock


class SparseNode:
    """The state that a node's sparse blocks share. A `scheduler.weights.StepListener`."""

    def __init__(self, scorers: Mapping[int, Scorer], judge: SparsityJudge, share: float | None = None) -> None:
        """Create the state.

        Args:
            scorers: the predictor of each layer, by the layer's number; it scores all of this node's neurons there.
            judge: decides whether a step predicts its neurons.
            share: expected share of the neurons that are predicted for a token; None if it is not known.
        """
        self.judge = judge
        self.forecast: SparsityForecast | None = None  # set if it says that predicting does not pay
        self._scorers, self._share = scorers, share
        self.on_prediction: OnPrediction = ignore_prediction  # called with predictions of later layers
        self.records: RecordTier | None = None  # set if neurons are read from disk one by one
        self._predictions = Predictions(scorers, lambda layer, choice: self.on_prediction(layer, choice))

    def begin(self, short: bool) -> None:
        """Begin a step: end the measurement of the step before. `short` is ignored."""
        self.judge.begin()

    def abandon(self) -> None:
        """Discard the measurements and predictions of a step that was aborted."""
        self.judge.abandon()
        self._predictions.abandon()

    def describe(self) -> str:
        """Return a sentence for the user on the decision, and on how much was skipped and read; may be empty."""
        if self.forecast is not None:
            return self.forecast.describe()
        read = "" if self.records is None else self.records.stats().describe()
        return "; ".join(filter(None, [self.judge.describe(), read]))

    def adapt_segment(self, segment: Segment, layer: int, first: int) -> Segment:
        """Return a segment that computes only active neurons.

        Other kinds of segments are returned unchanged, and so are all segments after `pays` returned False. `first` is
        the number of the segment's first neuron among the node's neurons of `layer`.
        """
        if self.forecast is not None or not isinstance(segment, FfnSegment) or segment.empty:
            return segment
        return SparseFfn(segment.device, segment.launch, segment.spec, layer, first, self)

    def choose(self, layer: int, spec: FfnSpec, device: Device, part: MicroBatch) -> NeuronChoice | None:
        """Return the neurons of a block to compute for a micro-batch, or None to compute all.

        The prediction is made once, and all segments of the block share it.
        """
        if not self.judge.predicts(len(part.x)):
            return None
        key = (SparseNode, layer)
        if key not in part.phase_results:
            costs = (
                None if self.records is not None else self.judge.costs
            )  # each skipped neuron saves a read, so always predict
            found = self._predictions.choose(layer, spec, device, part, costs)
            part.phase_results[key] = Finished(lambda: found)
        chosen: NeuronChoice | None = part.phase_results[key].wait()
        return chosen

    def measure(self, arrangement: Arrangement[Segment]) -> None:
        """Measure the share of active neurons above which computing all neurons is faster, for steps of one token.

        Measure it with the first block of `arrangement` that has one segment. Its weights must be in memory.
        """
        for segments, hold in zip(arrangement.blocks, arrangement.holds, strict=True):
            for segment in segments:
                if isinstance(segment, SparseFfn) and len(segments) == 1:
                    with hold as held:
                        for _, data in held:
                            self.judge.measure(segment.device.kernels, segment.spec, data)
                    return

    def pays(self, arrangement: Arrangement[Segment]) -> bool:
        """Return False if `--sparsity auto` is given and predicting is measured to take longer than it saves.

        One token of the first block that has one segment is timed; its weights must be in memory. Without a profile,
        which says how many neurons are active, nothing is timed.
        """
        if self._share is None or not self.judge.compares:
            return True
        for segments, hold in zip(arrangement.blocks, arrangement.holds, strict=True):
            own = [one for one in segments if isinstance(one, SparseFfn) and one.layer in self._scorers]
            if own and len(segments) == 1:
                with hold as held:
                    forecasts = [self._measured(own[0], data, self._share) for _, data in held]
                self.forecast = next((one for one in forecasts if not one.pays), None)
                return self.forecast is None
        return True

    def _measured(self, segment: "SparseFfn", data: Bytes, share: float) -> SparsityForecast:
        scorer = self._scorers[segment.layer]
        predict = partial(union_of, scorer.scores, scorer.threshold)
        return measure_forecast(segment.device.kernels, segment.spec, data, predict, share)


@dataclass(frozen=True, eq=False)
class SparseFfn:
    """A `worker.node.segment.Segment` of neurons on the host, of which only the active ones are computed.

    `first` is the number of its first neuron among all of the node's neurons of the layer.
    """

    device: Device
    launch: Launch
    spec: FfnSpec
    layer: int
    first: int
    node: SparseNode

    @property
    def empty(self) -> bool:
        """True if the segment has no neurons."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the block in the output phase; return None in the other phases, which compute nothing."""
        if Phase.OUTPUT not in phases:
            return None
        return self.launch(lambda: self._compute(data, part, take))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Raise TpiError, since a chain computes all neurons."""
        raise TpiError("predicted neurons cannot be part of a chain; run them block by block")

    def _compute(self, data: Bytes, part: MicroBatch, take: Take) -> F32:
        kernels, judge, tokens = self.device.kernels, self.node.judge, len(part.x)
        began = perf_counter()
        chosen = self.node.choose(self.layer, self.spec, self.device, part)
        predicted = perf_counter() - began
        if chosen is not None and not judge.measured(tokens):
            judge.measure(kernels, self.spec, data, part.prepared(self.spec, self.device, kernels))
        lists = [] if chosen is None else self._own(chosen, tokens)
        share = sum(map(len, lists)) / (len(lists) * self._neurons) if lists else 1.0
        began = perf_counter()
        found = self._listed(data, part, lists) if lists else kernels.ffn(self.spec, data, take(self))
        took = perf_counter() - began
        judge.note(predicted + took, tokens)
        judge.costs.record_computation(tokens, self._neurons, share, took)
        if chosen is not None:
            count = self._neurons * max(1, len(lists))
            judge.note_choice(round(share * count), count, predicted, predicted + took, tokens)
        return found

    def _listed(self, data: Bytes, part: MicroBatch, lists: Sequence[I32]) -> F32:
        """Compute the neurons in `lists`, one list for each piece of the step: `PIECE` consecutive tokens."""
        kernels, out = self.device.kernels, np.zeros_like(part.x)
        if len(lists) == 1:
            if len(lists[0]):
                out = kernels.ffn(self.spec, data, part.prepared(self.spec, self.device, kernels), lists[0])
            return out
        for number, listed in enumerate(lists):
            if len(listed):
                piece = slice(number * PIECE, (number + 1) * PIECE)
                out[piece] = kernels.ffn(self.spec, data, np.ascontiguousarray(part.x[piece]), listed)
        return out

    @property
    def _neurons(self) -> int:
        return self.spec.neuron.units * self.spec.neuron.width

    def _own(self, chosen: NeuronChoice, tokens: int) -> list[I32]:
        """Return the segment's own active neurons for each piece; an empty list if computing all neurons is faster."""
        lists = []
        for active in chosen.pieces or (chosen.active,):
            begin, end = np.searchsorted(active, (self.first, self.first + self._neurons))
            own = active[begin:end]
            lists.append(np.ascontiguousarray(own - np.int32(self.first)) if self.first else own)
        most = self.node.judge.limit(tokens) * self._neurons * len(lists)
        return lists if sum(map(len, lists)) <= most else []


def open_sparse(plan: NodePlan, held: Sequence[HeldBlock], host: Device) -> SparseNode | None:
    """Return the state of sparse blocks, or None if the plan has no predictors or `--sparsity` is off.

    Raises:
        WeightsError: if a predictor cannot be used.
    """
    mode = plan.options.sparsity
    if mode == "off" or not plan.predictors:
        return None
    predictors = predictors_of(plan, held)
    scorers = {layer: PlacedPredictor(one, host, stay) for layer, one in predictors.items()}
    return SparseNode(scorers, SparsityJudge(mode), _expected_share(plan, held))


def _expected_share(plan: NodePlan, held: Sequence[HeldBlock]) -> float | None:
    """Return the share of the node's neurons that predictors are expected to name; None without a profile."""
    if any("frequency" not in held[one.block].vectors for one in plan.predictors):
        return None
    found = frequencies_of(plan, held).values()
    return float(np.mean([np.minimum(1.0, NAMED * often).mean() for often in found]))
