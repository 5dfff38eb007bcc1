"""Which neurons the next layers will need: predictions made ahead on the accelerator, while this layer is computed.

A predictor that looks k layers ahead is given the input of layer i - k, and says two things of layer i: what should
migrate by then, and what is computed then (DynamicInfer, design 1). One that looks no layers ahead is asked when its
layer's turn comes; what it names should be there for the next token.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler.neurons.layer import LayerArena
from tpi.devices.base import Device, Finished, Pending
from tpi.devices.pages import Bytes
from tpi.kernels.spec import FfnSpec
from tpi.sparsity.predictor import Given, Predictor
from worker.neurons.hybrid import Choose, NeuronChoice
from worker.node.microbatch import MicroBatch

F32 = npt.NDArray[np.float32]
Place = Callable[[Bytes], Bytes]
"""Brings bytes into a device's memory, and returns where they are."""
UNION = 8  # tokens of a step that share a union; longer ones compute all neurons


class Scorer(Protocol):
    """Says of every neuron of one layer how likely it is to be active."""

    @property
    def threshold(self) -> float:
        """From which score on it counts as active."""

    @property
    def ahead(self) -> int:
        """How many layers before its own it is asked."""

    @property
    def given(self) -> Given:
        """What it is given."""

    def scores(self, x: F32, /) -> F32:
        """`[tokens, neurons]` for `x` `[tokens, hidden]`."""


class PlacedPredictor:
    """A `Scorer`: a predictor whose matrices lie in the memory of a device, which multiplies with them."""

    def __init__(self, predictor: Predictor, device: Device, place: Place) -> None:
        """`place` brings bytes into the memory of `device`."""
        self.threshold, self.ahead, self.given = predictor.threshold, predictor.ahead, predictor.given
        self._predictor, self._kernels = predictor, device.kernels
        self._first, self._second = (place(matrix.data) for matrix in (predictor.first, predictor.second))

    def scores(self, x: F32, /) -> F32:
        """See `Scorer.scores`."""
        of, kernels = self._predictor, self._kernels
        between = kernels.logits(of.first.run, self._first, np.ascontiguousarray(x))[:, : of.rank]
        between = np.ascontiguousarray(np.maximum(between, np.float32(0)))
        found: F32 = kernels.logits(of.second.run, self._second, between)[:, : of.neurons]
        return found if of.bias is None else found + of.bias


class Foresight:
    """The predictions of one node, layer by layer. By one thread; a device may compute them meanwhile."""

    def __init__(self, scorers: Mapping[int, Scorer], arenas: Mapping[int, LayerArena], device: Device) -> None:
        """By layer; `device` has those who look ahead asked."""
        self._scorers, self._arenas, self._device = scorers, arenas, device
        self._asked: dict[int, list[int]] = {}  # at each layer, whom
        for layer, scorer in scorers.items():
            self._asked.setdefault(layer - scorer.ahead, []).append(layer)
        self._coming: dict[int, Pending[F32]] = {}

    def of(self, layer: int, spec: FfnSpec, host: Device) -> Choose:
        """What a block is told to compute; `spec` is of all its neurons, `host` norms its input."""

        def choose(part: MicroBatch) -> NeuronChoice | None:
            if len(part.x) > UNION:
                self._coming.clear()
                return None
            x = part.prepared(spec, host, host.kernels)
            return self._choose(layer, part, x if isinstance(x, np.ndarray) else x.values())

        return choose

    def abandon(self) -> None:
        """The step breaks off."""
        for pending in self._coming.values():
            Finished(pending.wait)  # whatever comes of it
        self._coming.clear()

    def _choose(self, layer: int, part: MicroBatch, normed: F32) -> NeuronChoice | None:
        scorer = self._scorers.get(layer)
        if scorer is None:
            return None
        coming = self._coming.pop(layer, None)
        scores = scorer.scores(_given(scorer, part.x, normed)) if coming is None else coming.wait()
        later = [each for each in self._asked.get(layer, ()) if each != layer]
        chosen = _chosen(scores, scorer.threshold, partial(self._ask, later, part.x, normed))
        if coming is None:
            self._arenas[layer].expect(chosen.active)
        return chosen

    def _ask(self, layers: list[int], x: F32, normed: F32) -> None:
        for layer in layers:
            self._foretell(layer, _given(self._scorers[layer], x, normed))

    def _foretell(self, layer: int, x: F32) -> None:
        """Have a later layer foretold, and what is worth it migrate, while this one is computed."""
        scorer, arena = self._scorers[layer], self._arenas[layer]

        def call() -> F32:
            scores = scorer.scores(x)
            arena.expect(_active(scores, scorer.threshold))
            return scores

        self._coming[layer] = self._device.start(call)


def _given(scorer: Scorer, x: F32, normed: F32) -> F32:
    return normed if scorer.given == "normed" else x


def _active(scores: F32, threshold: float) -> npt.NDArray[np.int32]:
    return np.flatnonzero((scores >= np.float32(threshold)).any(axis=0)).astype(np.int32)


def _chosen(scores: F32, threshold: float, then: Callable[[], None]) -> NeuronChoice:
    active = _active(scores, threshold)
    return NeuronChoice(active, scores[0] if len(scores) == 1 else None, threshold, then)


def scorers_of(predictors: Mapping[int, Predictor], device: Device, place: Place) -> dict[int, Scorer]:
    """The predictors of a model in a device's memory, by layer."""
    return {layer: PlacedPredictor(predictor, device, place) for layer, predictor in predictors.items()}
