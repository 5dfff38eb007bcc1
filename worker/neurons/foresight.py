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
from worker.neurons.fallback import DenseFallback
from worker.neurons.hybrid import HABITS, Choose, NeuronChoice
from worker.neurons.union import Union, union_of
from worker.node.microbatch import MicroBatch

F32 = npt.NDArray[np.float32]
Place = Callable[[Bytes], Bytes]
"""Brings bytes into a device's memory, and returns where they are."""


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

    def __init__(
        self,
        scorers: Mapping[int, Scorer],
        arenas: Mapping[int, LayerArena],
        devices: Mapping[int, Device],
        fallback: DenseFallback,
    ) -> None:
        """By layer; of `devices` each has its scorers that look ahead asked. `fallback` says whom to ask."""
        self._scorers, self._arenas, self._devices, self._fallback = scorers, arenas, devices, fallback
        self._later: dict[int, list[int]] = {}  # at each layer, whom to ask of later ones
        for layer, scorer in scorers.items():
            if scorer.ahead:
                self._later.setdefault(layer - scorer.ahead, []).append(layer)
        self._coming: dict[tuple[int, int], Pending[Union]] = {}  # by micro-batch and layer

    def of(self, layer: int, spec: FfnSpec, host: Device) -> Choose:
        """What a block is told to compute; `spec` is of all its neurons, `host` norms its input."""

        def choose(part: MicroBatch) -> NeuronChoice | None:
            x = part.prepared(spec, host, host.kernels)
            return self._choose(layer, part, x if isinstance(x, np.ndarray) else x.values())

        return choose

    def abandon(self) -> None:
        """The step breaks off."""
        for pending in self._coming.values():
            Finished(pending.wait)  # whatever comes of it
        self._coming.clear()

    def _choose(self, layer: int, part: MicroBatch, normed: F32) -> NeuronChoice | None:
        scorer, coming = self._scorers.get(layer), self._coming.pop((id(part), layer), None)
        later = [each for each in self._later.get(layer, ()) if self._fallback.asks(each, len(part.x))]
        ask = partial(self._ask, later, part, normed)
        if coming is not None:
            found = coming.wait()
        elif scorer is not None and not scorer.ahead and self._fallback.asks(layer, len(part.x)):
            found = self._union(layer, _given(scorer, part.x, normed))
        else:
            ask()
            return None
        return NeuronChoice(found.active, found.scores, 0.0 if scorer is None else scorer.threshold, ask)

    def _ask(self, layers: list[int], part: MicroBatch, normed: F32) -> None:
        """Have later layers foretold, and what is worth it migrate, while this one is computed."""
        for layer in layers:
            call = partial(self._union, layer, _given(self._scorers[layer], part.x, normed))
            self._coming[id(part), layer] = self._devices[layer].start(call)

    def _union(self, layer: int, x: F32) -> Union:
        scorer, arena = self._scorers[layer], self._arenas[layer]
        found = union_of(scorer.scores, scorer.threshold, x)
        if len(x) <= HABITS:
            arena.expect(found.active)
        return found


def _given(scorer: Scorer, x: F32, normed: F32) -> F32:
    return normed if scorer.given == "normed" else x


def stay(data: Bytes) -> Bytes:
    """A `Place` in the host's memory, where they are."""
    return data
