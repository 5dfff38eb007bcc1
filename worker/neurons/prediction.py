"""What a node's predictors say of a step: which of its own neurons are active, layer by layer, on the host.

A predictor that looks k layers ahead is asked at layer i - k, and answers at layer i; one that looks nowhere is asked
when its layer's turn comes. Several tokens need the union of theirs. Steps of more than `UNION` tokens compute all
neurons, as few are left out by then.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Device
from tpi.kernels.spec import FfnSpec
from worker.neurons.foresight import UNION, Scorer
from worker.neurons.hybrid import NeuronChoice
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
        self._coming: dict[int, NeuronChoice] = {}

    def choose(self, layer: int, spec: FfnSpec, device: Device, part: MicroBatch) -> NeuronChoice | None:
        """What a block is to compute for a micro-batch; None: all. `spec` is of its neurons on the host, `device`."""
        if len(part.x) > UNION:
            self._coming.clear()
            return None
        prepared = part.prepared(spec, device, device.kernels)
        normed = prepared if isinstance(prepared, np.ndarray) else prepared.values()
        for later in self._later.get(layer, ()):
            self._coming[later] = choice = self._chosen(later, part.x, normed)
            self._foretell(later, choice)
        if layer not in self._scorers:
            return None
        coming = self._coming.pop(layer, None)
        return self._chosen(layer, part.x, normed) if coming is None else coming

    def _chosen(self, layer: int, x: F32, normed: F32) -> NeuronChoice:
        scorer = self._scorers[layer]
        scores = scorer.scores(normed if scorer.given == "normed" else x)
        active = np.flatnonzero((scores >= np.float32(scorer.threshold)).any(axis=0)).astype(np.int32)
        return NeuronChoice(active, scores[0] if len(scores) == 1 else None, scorer.threshold)
