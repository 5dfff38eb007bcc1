"""Predictions of the neurons that later layers need, made on the accelerator while a layer is computed.

A predictor that looks k layers ahead takes the input of layer i - k. Its result chooses the neurons that migrate
before layer i, and the neurons that layer i computes (DynamicInfer, design 1). With k = 0 it runs at its own layer, and
the neurons that it names migrate for the next token.
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
from tpi.sparsity.predictor import InputKind, Predictor
from worker.neurons.fallback import DenseFallback
from worker.neurons.hybrid import FREQUENCY_TOKENS, Choose, NeuronChoice
from worker.neurons.union import Union, union_of
from worker.node.microbatch import MicroBatch

F32 = npt.NDArray[np.float32]
Place = Callable[[Bytes], Bytes]
"""A function that copies bytes into a device's memory, and returns the copy."""


class Scorer(Protocol):
    """A model of how likely each neuron of one layer is to be active."""

    @property
    def threshold(self) -> float:
        """Score from which a neuron counts as active."""

    @property
    def ahead(self) -> int:
        """Number of layers before its own at which the scorer runs."""

    @property
    def input_kind(self) -> InputKind:
        """Input of the scorer: the hidden states before the block, or after its norm."""

    def scores(self, x: F32, /) -> F32:
        """Return scores `[tokens, neurons]` for `x` `[tokens, hidden]`."""


class PlacedPredictor:
    """A `Scorer` that runs a predictor on one device, in whose memory the predictor's matrices lie."""

    def __init__(self, predictor: Predictor, device: Device, place: Place) -> None:
        """Copy the predictor's matrices into the memory of `device` with `place`."""
        self.threshold, self.ahead, self.input_kind = predictor.threshold, predictor.ahead, predictor.input_kind
        self._predictor, self._kernels = predictor, device.kernels
        self._first, self._second = (place(matrix.data) for matrix in (predictor.first, predictor.second))

    def scores(self, x: F32, /) -> F32:
        """Return scores `[tokens, neurons]` for `x` `[tokens, hidden]`, computed on the device."""
        of, kernels = self._predictor, self._kernels
        between = kernels.logits(of.first.run, self._first, np.ascontiguousarray(x))[:, : of.rank]
        between = np.ascontiguousarray(np.maximum(between, np.float32(0)))
        found: F32 = kernels.logits(of.second.run, self._second, between)[:, : of.neurons]
        return found if of.bias is None else found + of.bias


class LookaheadPredictions:
    """The predictions of one node, layer by layer. Only one thread uses them. Devices may compute them in the
    background.
    """

    def __init__(
        self,
        scorers: Mapping[int, Scorer],
        arenas: Mapping[int, LayerArena],
        devices: Mapping[int, Device],
        fallback: DenseFallback,
    ) -> None:
        """Create predictions from scorers, arenas and the devices that run the scorers, each by layer.

        `fallback` decides for which layers neurons are predicted.
        """
        self._scorers, self._arenas, self._devices, self._fallback = scorers, arenas, devices, fallback
        self._later: dict[int, list[int]] = {}  # by layer, the later layers whose scorers run there
        for layer, scorer in scorers.items():
            if scorer.ahead:
                self._later.setdefault(layer - scorer.ahead, []).append(layer)
        self._coming: dict[tuple[int, int], Pending[Union]] = {}  # by micro-batch and layer

    def choice_for(self, layer: int, spec: FfnSpec, host: Device) -> Choose:
        """Return the function that predicts the active neurons of a layer's block.

        `spec` describes all neurons of the block. `host` is the device that applies the norm to its input.
        """

        def choose(part: MicroBatch) -> NeuronChoice | None:
            x = part.prepared(spec, host, host.kernels)
            return self._choose(layer, part, x if isinstance(x, np.ndarray) else x.values())

        return choose

    def abandon(self) -> None:
        """Discard the predictions of a step that was aborted."""
        for pending in self._coming.values():
            Finished(pending.wait)  # wait for it and ignore its outcome
        self._coming.clear()

    def _choose(self, layer: int, part: MicroBatch, normed: F32) -> NeuronChoice | None:
        scorer, coming = self._scorers.get(layer), self._coming.pop((id(part), layer), None)
        later = [each for each in self._later.get(layer, ()) if self._fallback.should_predict(each, len(part.x))]
        ask = partial(self._ask, later, part, normed)
        if coming is not None:
            found = coming.wait()
        elif scorer is not None and not scorer.ahead and self._fallback.should_predict(layer, len(part.x)):
            found = self._union(layer, _given(scorer, part.x, normed))
        else:
            ask()
            return None
        return NeuronChoice(found.active, found.scores, 0.0 if scorer is None else scorer.threshold, ask)

    def _ask(self, layers: list[int], part: MicroBatch, normed: F32) -> None:
        """Start the predictions for the given later `layers`; they run while the present layer is computed."""
        for layer in layers:
            call = partial(self._union, layer, _given(self._scorers[layer], part.x, normed))
            self._coming[id(part), layer] = self._devices[layer].start(call)

    def _union(self, layer: int, x: F32) -> Union:
        scorer, arena = self._scorers[layer], self._arenas[layer]
        found = union_of(scorer.scores, scorer.threshold, x)
        if len(x) <= FREQUENCY_TOKENS:
            arena.expect(found.active)
        return found


def _given(scorer: Scorer, x: F32, normed: F32) -> F32:
    return normed if scorer.input_kind == "normed" else x


def stay(data: Bytes) -> Bytes:
    """Return `data` unchanged: the `Place` of bytes that stay in the host's memory."""
    return data
