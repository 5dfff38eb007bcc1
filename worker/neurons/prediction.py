"""What a node's predictors say of a step: which of its own neurons are active, layer by layer, on the host.

A predictor that looks k layers ahead is asked at layer i - k, and answers at layer i; one that looks nowhere is asked
when its layer's turn comes. Several tokens need the union of theirs, or piece by piece; whether that is worth
predicting costs say (`worker.neurons.union.UnionCosts`).
"""

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device
from tpi.kernels.spec import FfnSpec
from worker.neurons.foresight import Scorer
from worker.neurons.hybrid import NeuronChoice
from worker.neurons.union import UnionCosts, union_of
from worker.node.microbatch import MicroBatch

F32 = npt.NDArray[np.float32]
Foretell = Callable[[int, NeuronChoice], None]
"""Told of a layer what will be active there, as soon as it is known."""


def nobody(layer: int, choice: NeuronChoice) -> None:
    """Nothing is done ahead."""


class Predictions:
    """The predictions of one node; by one thread."""

    def __init__(self, scorers: Mapping[int, Scorer], foretell: Foretell = nobody) -> None:
        """`scorers` by layer, each of all of the node's neurons of it."""
        self._scorers, self._foretell = scorers, foretell
        self._later: dict[int, list[int]] = {}  # at each layer, whom to ask of later ones
        for layer, scorer in scorers.items():
            if scorer.ahead:
                self._later.setdefault(layer - scorer.ahead, []).append(layer)
        self._coming: dict[tuple[int, int], NeuronChoice | None] = {}  # by micro-batch and layer

    def choose(
        self, layer: int, spec: FfnSpec, device: Device, part: MicroBatch, costs: UnionCosts | None
    ) -> NeuronChoice | None:
        """What a block is to compute for a micro-batch; None: all. `spec` is of its neurons on the host, `device`.

        Without `costs` predictions are asked for whatever they cost, and believed however many they name.
        """
        prepared = part.prepared(spec, device, device.kernels)
        normed = prepared if isinstance(prepared, np.ndarray) else prepared.values()
        for later in self._later.get(layer, ()):
            self._coming[id(part), later] = choice = self._chosen(later, part.x, normed, costs)
            if choice is not None:
                self._foretell(later, choice)
        if (id(part), layer) in self._coming:
            return self._coming.pop((id(part), layer))
        return self._chosen(layer, part.x, normed, costs) if layer in self._scorers else None

    def abandon(self) -> None:
        """The step breaks off."""
        self._coming.clear()

    def _chosen(self, layer: int, x: F32, normed: F32, costs: UnionCosts | None) -> NeuronChoice | None:
        """What is predicted; None where that was not worth it, or is more than all are faster from."""
        scorer, tokens = self._scorers[layer], len(x)
        given = x if scorer.given == "residual" else normed
        if costs is None or tokens == 1:
            found = union_of(scorer.scores, scorer.threshold, given)
        elif not costs.asks(layer, tokens):
            return None
        else:
            began, limit = perf_counter(), costs.limit(tokens)
            found = union_of(scorer.scores, scorer.threshold, given, 1.0 if limit is None else limit)
            costs.predicted(layer, found, tokens, perf_counter() - began)
            if found.over:
                return None
        return NeuronChoice(found.active, found.scores, scorer.threshold, pieces=found.pieces)
