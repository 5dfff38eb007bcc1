"""A feed-forward block that the accelerator and the CPU compute together.

Each computes the active neurons that are assigned to it, and the two results are added.

A `Choose` function predicts the active neurons; the arena's index table (`scheduler.neurons.arena`) assigns each to a
side. The accelerator is started first, and the CPU computes at the same time. A side without active neurons is not
called.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.neurons.layer import HeldNeurons, LayerArena
from scheduler.slots.table import I32
from tpi.devices.base import Device, Finished, Pending, wait_all
from tpi.devices.pages import Bytes
from tpi.kernels.spec import ChainBlock, FfnSpec, Input, Residual
from worker.neurons.fallback import DenseFallback
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import FfnSegment, Launch, Phases, Take

F32 = npt.NDArray[np.float32]
FREQUENCY_TOKENS = 8  # most tokens of a step whose active neurons count towards the recent frequencies


@dataclass(frozen=True, eq=False)
class NeuronChoice:
    """The prediction for a block: its `active` neurons, int32, ascending and unique.

    Attributes:
        scores: `[neurons]` for a single token, else None; a neuron is active if its score reaches `threshold`.
        then: a function that starts the predictions of later layers; called after the accelerator's part was started.
        pieces: for many tokens, the active neurons of each piece of the step (`worker.neurons.union`); else empty.
    """

    active: I32
    scores: F32 | None = None
    threshold: float = 0.0
    then: Callable[[], None] = lambda: None
    pieces: tuple[I32, ...] = ()


Choose = Callable[[MicroBatch], NeuronChoice | None]
"""A function that predicts the active neurons for a micro-batch. None means that computing all neurons is faster."""


@dataclass(frozen=True, eq=False)
class HybridFfn:
    """A `worker.node.segment.Segment`: all neurons of a block in the host's memory, some in the accelerator's arena.

    Attributes:
        device: the host.
        spec: the block with all its neurons.
        accelerator: the accelerator that computes the neurons in the arena.
        launch: starts a call on the accelerator.
        arena: the slots on the accelerator, and the table that says which neurons are in them.
        choose: predicts the active neurons.
        clock: times both sides, in seconds; an emulated accelerator has a clock of its own.
        fallback: chooses between active neurons on both sides and all neurons on the host.
        layer: the number of the layer.
        measured: returns the share of active neurons above which computing all neurons is faster on the host.
    """

    device: Device
    spec: FfnSpec
    accelerator: Device
    launch: Launch
    arena: LayerArena
    choose: Choose
    clock: Callable[[], float] = time.perf_counter
    fallback: DenseFallback = field(default_factory=DenseFallback)
    layer: int = 0
    measured: Callable[[Bytes, Input], float] | None = None

    @property
    def empty(self) -> bool:
        """True if the node has no neurons of this block."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the block in the output phase; return None in the other phases, which compute nothing."""
        if Phase.OUTPUT not in phases:
            return None
        whole = FfnSegment(self.device, self.device.start, self.spec)
        chosen = None if self.empty else self.choose(part)
        if chosen is None:
            return whole.start(phases, data, part, take)
        self._measure(data, part)
        if chosen.scores is None:
            held = self.arena.divide_active(chosen.active)
        else:
            held = self.arena.divide(chosen.scores, chosen.threshold)
        if len(part.x) <= FREQUENCY_TOKENS:
            self.arena.count_active(chosen.active)
        if not self._pays(held, len(part.x)):
            held.cancel()
            chosen.then()
            return whole.start(phases, data, part, take)
        pending = self._there(held, part, take)
        chosen.then()
        pending += self._here(held, data, part, take)
        return Merged(pending) if pending else Finished(lambda: np.zeros_like(part.x))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the block as a part of a chain, which computes all neurons."""
        return ChainBlock(self.spec, data, residual)

    def _measure(self, data: Bytes, part: MicroBatch) -> None:
        """Measure the limit of `fallback` for the step's size, unless it is known: above it, computing all neurons
        is faster.
        """
        if (measured := self.measured) is not None:
            kernels = self.device.kernels
            self.fallback.limit(len(part.x), lambda: measured(data, part.prepared(self.spec, self.device, kernels)))

    def _pays(self, held: HeldNeurons, tokens: int) -> bool:
        count = self.spec.neuron.units * self.spec.neuron.width
        paid = self.fallback.prefers_active(
            len(held.slots), len(held.cpu_neurons), count, self.arena.lines(tokens), tokens
        )
        self.fallback.note(self.layer, tokens, paid)
        return paid

    @cached_property
    def _slots(self) -> FfnSpec:
        """Description of a block whose neurons are the arena's slots, without biases."""
        neuron = self.spec.neuron
        units = len(self.arena.table) // neuron.width
        return replace(self.spec, neuron=replace(neuron, units=units), gate_bias=None, up_bias=None)

    def _spec_of(self, held: HeldNeurons) -> FfnSpec:
        """Return the description of the slots' block, with the bias of each held neuron placed at the neuron's slot."""
        given = self.spec
        if given.gate_bias is None and given.up_bias is None:
            return self._slots
        count = len(self.arena.table)
        gate, up = (_placed(bias, held, count) for bias in (given.gate_bias, given.up_bias))
        return replace(self._slots, gate_bias=gate, up_bias=up)

    def _there(self, held: HeldNeurons, part: MicroBatch, take: Take) -> list[Pending[F32]]:
        """Start to compute the active neurons of the accelerator, if there are any; then release their slots."""
        if not len(held.slots):
            return []
        spec, kernels, arena = self._spec_of(held), self.accelerator.kernels, self.arena
        try:
            x = take(FfnSegment(self.accelerator, self.launch, spec))
        except BaseException:
            held.release()
            raise

        def call() -> F32:
            try:
                began = self.clock()
                found = kernels.ffn(spec, arena.data, x, held.slots)
                arena.record_accelerator_time(len(held.slots), self.clock() - began, len(part.x))
                return found
            finally:
                held.release()

        return [self.launch(call)]

    def _here(self, held: HeldNeurons, data: Bytes, part: MicroBatch, take: Take) -> list[Pending[F32]]:
        if not len(held.cpu_neurons):
            return []
        spec, kernels, x = self.spec, self.device.kernels, take(self)

        def call() -> F32:
            began = self.clock()
            found = kernels.ffn(spec, data, x, held.cpu_neurons)
            self.arena.record_cpu_time(len(held.cpu_neurons), self.clock() - began, len(part.x))
            return found

        return [self.device.start(call)]


class Merged:
    """The sum of several pending results: a `tpi.devices.base.Pending`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Pending[F32]]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """True if all parts are done."""
        return all(part.done for part in self._parts)

    def wait(self) -> F32:
        """Wait for all parts and return their sum, always added in the same order so that results are reproducible."""
        first, *others = wait_all(self._parts)
        total = first.copy() if others else first
        for other in others:
            total += other
        return total


def _placed(bias: F32 | None, held: HeldNeurons, slots: int) -> F32 | None:
    if bias is None:
        return None
    found = np.zeros(slots, np.float32)
    found[held.slots] = bias[held.neurons]
    return found
