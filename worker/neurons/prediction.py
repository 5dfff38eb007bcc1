"""Predictions of a node's active neurons, layer by layer, on the host.

A predictor that looks k layers ahead runs at layer i - k, and its result is used at layer i; k may be 0. Steps of
several tokens compute the union of their active neurons, or one union for each piece of the step. Measured costs
decide whether predicting is worth it (`worker.neurons.union.UnionCosts`).
"""

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device
from tpi.kernels.spec import FfnSpec
from worker.neurons.hybrid import NeuronChoice
from worker.neurons.lookahead import Scorer
from worker.neurons.union import UnionCosts, union_of
from worker.node.microbatch import MicroBatch

F32 = npt.NDArray[np.float32]
OnPrediction = Callable[[int, NeuronChoice], None]
"""A function that is called with the number of a later layer and its prediction, as soon as that is known."""


def ignore_prediction(layer: int, choice: NeuronChoice) -> None:
    """Ignore the prediction: the default of `Predictions`."""


class Predictions:
    """The predictions of one node. Only one thread uses it."""

    def __init__(self, scorers: Mapping[int, Scorer], on_prediction: OnPrediction = ignore_prediction) -> None:
        """Create predictions.

        Args:
            scorers: the predictor of each layer, by the layer's number; it scores all of this node's neurons there.
            on_prediction: called with the number of a later layer and the neurons that were predicted for it.
        """
        self._scorers, self._on_prediction = scorers, on_prediction
        self._later: dict[int, list[int]] = {}  # by layer, the later layers whose predictors run there
        for layer, scorer in scorers.items():
            if scorer.ahead:
                self._later.setdefault(layer - scorer.ahead, []).append(layer)
        self._coming: dict[tuple[int, int], NeuronChoice | None] = {}  # by micro-batch and layer

    def choose(
        self, layer: int, spec: FfnSpec, device: Device, part: MicroBatch, costs: UnionCosts | None
    ) -> NeuronChoice | None:
        """Return the prediction of a block for a micro-batch, or None to compute all neurons.

        `spec` describes the block's neurons on the host, `device`. Without `costs`, neurons are always predicted, and
        predictions are used however many neurons they name.
        """
        prepared = part.prepared(spec, device, device.kernels)
        normed = prepared if isinstance(prepared, np.ndarray) else prepared.values()
        for later in self._later.get(layer, ()):
            self._coming[id(part), later] = choice = self._chosen(later, part.x, normed, costs)
            if choice is not None:
                self._on_prediction(later, choice)
        if (id(part), layer) in self._coming:
            return self._coming.pop((id(part), layer))
        return self._chosen(layer, part.x, normed, costs) if layer in self._scorers else None

    def abandon(self) -> None:
        """Discard the predictions of a step that was aborted."""
        self._coming.clear()

    def _chosen(self, layer: int, x: F32, normed: F32, costs: UnionCosts | None) -> NeuronChoice | None:
        """Predict a layer's active neurons; return None if all neurons should be computed.

        That is so if predicting takes longer than it saves, or if too many neurons are active.
        """
        scorer, tokens = self._scorers[layer], len(x)
        given = x if scorer.input_kind == "residual" else normed
        if costs is None or tokens == 1:
            found = union_of(scorer.scores, scorer.threshold, given)
        elif not costs.should_predict(layer, tokens):
            return None
        else:
            began, limit = perf_counter(), costs.limit(tokens)
            found = union_of(scorer.scores, scorer.threshold, given, 1.0 if limit is None else limit)
            costs.record_prediction(layer, found, tokens, perf_counter() - began)
            if found.exceeded:
                return None
        return NeuronChoice(found.active, found.scores, scorer.threshold, pieces=found.pieces)
