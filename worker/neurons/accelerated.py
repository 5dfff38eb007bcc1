"""An accelerator that shares feed-forward blocks with the CPU neuron by neuron: arena, predictors and blocks."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

import numpy as np

from scheduler.neurons.arena import NeuronArena
from scheduler.neurons.layout import ArenaLayer, arena_bytes, arena_layer
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.errors import PlanError
from tpi.kernels.spec import Input
from worker.accelerator.accelerated import Accelerators
from worker.neurons.fallback import DenseFallback
from worker.neurons.hybrid import HybridFfn
from worker.neurons.judge import measure_limit
from worker.neurons.lookahead import LookaheadPredictions, PlacedPredictor, Scorer, stay
from worker.node.segment import FfnSegment, Segment, launching
from worker.plan.modes.neurons import NeuronArenas


class NeuronAccelerated(Accelerators):
    """An `Accelerators` whose accelerator holds some neurons of the feed-forward blocks, chosen token by token."""

    arena: NeuronArena | None = None  # None until `open_rings`

    def open_rings(self, window: Window) -> None:
        """Fill the arena from `window`, which has all neurons in memory, and load the predictors.

        Raises:
            PlanError: if `window` does not have all neurons in memory.
            DeviceFullError: if the accelerator has no room for the arena or the predictors.
        """
        super().open_rings(window)
        if window.kept is None:
            raise PlanError("neurons migrate from the host's memory, which does not hold them all; give more --memory")
        self._neurons: NeuronArenas = self._details
        self._clock, self._fallback = clock_of(self.device), DenseFallback()
        layers = self._layers(window.kept)
        ends = list(accumulate(layer.nbytes for layer in layers.values()))
        memory = self._allocations.allocate(self.device, arena_bytes(list(layers.values())), ends[:-1])
        setup = self._neurons.setup
        self.arena = NeuronArena(
            self.device,
            memory,
            list(layers.values()),
            self._queue,
            setup.migration,
            trace=self._trace,
            clock=self._clock,
        )
        arenas = dict(zip(layers, self.arena.layers, strict=True))
        placed, given = self._predictors(), setup.scorers
        devices = {**{layer: device for layer, (_, device) in placed.items()}, **dict.fromkeys(given, self.device)}
        scorers = {**{layer: scorer for layer, (scorer, _) in placed.items()}, **given}
        self.foresight = LookaheadPredictions(scorers, arenas, devices, self._fallback)
        self._arenas = arenas

    def adapt_host_segment(self, segment: Segment, layer: int, name: str) -> Segment:
        """Return a `HybridFfn` for a feed-forward block with neurons in the arena; other segments are unchanged."""
        if not isinstance(segment, FfnSegment) or layer not in self._arenas:
            return segment
        choose = self.foresight.choice_for(layer, segment.spec, segment.device)
        launch, arena = launching(self.device, self._trace, name), self._arenas[layer]
        kernels, spec, clock = segment.device.kernels, segment.spec, self._clock

        def measured(data: Bytes, x: Input | None) -> float:
            return measure_limit(kernels, spec, data, clock, x)

        if not self._fallback.known:
            self._fallback.learn(1, measured(arena.layer.records.reshape(-1), None))
        return HybridFfn(
            segment.device, spec, self.device, launch, arena, choose, clock, self._fallback, layer, measured
        )

    def begin(self, short: bool) -> None:
        """Begin a step; raise the error of a migration that failed."""
        super().begin(short)
        if self.arena is not None:
            self.arena.begin()

    def abandon(self) -> None:
        """Discard the predictions of an aborted step, and wait until no neurons migrate."""
        super().abandon()
        if self.arena is not None:
            self.foresight.abandon()
            self.arena.wait()

    def describe(self) -> str:
        """Return a sentence for the user on what accelerator and CPU computed, and how many neurons migrated."""
        assert self.arena is not None
        figures = self.arena.figures
        share = figures.active_on_accelerator / max(1, figures.active)
        dense, setup = self._fallback.dense, self._neurons.setup
        said = [
            f"{super().describe()}; it computed {share:.0%} of the active neurons; {figures.moved} migrated, "
            f"{figures.moved_bytes / 1e6:.0f} MB",
            f"{len(self._neurons.predictors_on_accelerator)} of {len(setup.predictors)} predictors lie on it"
            if setup.predictors
            else "",
            f"{dense} blocks computed all neurons, which was faster" if dense else "",
        ]
        return "; ".join(filter(None, said))

    @property
    def resident_summary(self) -> str:
        """A sentence for the user on how many whole blocks and single neurons the accelerator holds."""
        assert self.arena is not None
        plan, layers = self.offload, self.arena.layers
        single = {number for number, piece in enumerate(plan.pieces) if piece.block.layer in self._arenas
                  and piece.block.kind != "attention"}  # fmt: skip
        slots, neurons = sum(len(each.table) for each in layers), sum(each.layer.neurons for each in layers)
        return (
            f"{self.device.name} holds {len(plan.resident)} of {len(plan.pieces) - len(single)} other blocks and "
            f"{slots} of {neurons} neurons"
        )

    def _layers(self, kept: Sequence[Bytes]) -> dict[int, ArenaLayer]:
        """Return the arena's input for each layer of neurons, by the layer's number.

        It has the records of all neurons, taken from `kept`, the bytes of the window's segments. It also says how often
        each neuron is active, and which neurons are in the arena at first.
        """
        found: dict[int, ArenaLayer] = {}
        chosen = iter(self._neurons.placement.neurons)
        for block in self._places.long:
            for segment in block:
                if segment.memory == "window" and segment.block.kind != "attention":
                    layer, layout = segment.block.layer, segment.runs[0].layout
                    count = segment.nbytes // layout.record_bytes
                    records = kept[segment.number][: segment.nbytes].reshape(count, layout.record_bytes)
                    frequency = _padded(self._neurons.setup.frequency[layer], count)
                    found[layer] = arena_layer(segment.block.name, records, frequency, next(chosen))
        return found

    def _predictors(self) -> dict[int, tuple[Scorer, Device]]:
        found: dict[int, tuple[Scorer, Device]] = {}
        for layer, predictor in self._neurons.setup.predictors.items():
            there = layer in self._neurons.predictors_on_accelerator
            device, place = (self.device, self._bring) if there else (self._host, stay)
            found[layer] = (PlacedPredictor(predictor, device, place), device)
        return found

    def _bring(self, data: Bytes) -> Bytes:
        there = self._allocations.allocate(self.device, data.size)
        self.device.copy(data, there).wait()
        return there


def clock_of(device: Device) -> Callable[[], float]:
    """Return the clock that times a device's calls and copies, in seconds; an emulated device has its own."""
    emulation: Any = getattr(device, "emulation", None)
    clock: Callable[[], float] = perf_counter if emulation is None else emulation.clock.now
    return clock


def _padded(frequency: np.ndarray, count: int) -> np.ndarray:
    return np.pad(frequency, (0, count - len(frequency)))
