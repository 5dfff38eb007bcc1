"""A feed-forward block on an accelerator and the CPU at the same time: each computes its active neurons, one merge.

Which neurons are active is said by whoever predicts (`Choose`); who computes each is said by the arena's index table
(`scheduler.neurons.arena`). The accelerator is started first and the CPU computes beside it. Where one side has nothing
to do there is no call for it, and where no neuron is active, none at all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.neurons.layer import HeldNeurons, LayerArena
from scheduler.neurons.slots import I32
from tpi.devices.base import Device, Finished, Pending, wait_all
from tpi.devices.pages import Bytes
from tpi.kernels.spec import ChainBlock, FfnSpec, Input, Residual
from worker.neurons.fallback import DenseFallback
from worker.node.microbatch import MicroBatch
from worker.node.order import Phase
from worker.node.segment import FfnSegment, Launch, Phases, Take

F32 = npt.NDArray[np.float32]
HABITS = 8  # tokens of a step at most whose union says something of how often a neuron is active


def _nothing() -> None:
    """Nobody looks ahead."""


@dataclass(frozen=True, eq=False)
class NeuronChoice:
    """What a prediction says of a block: `active`, int32 in order, each once.

    For a single token also the `scores` `[neurons]` from `threshold` on which they are active; else None. `then` is
    called when the accelerator has been told of its part: what is asked of it there comes after that. Of many tokens
    `pieces` are those that each few of them need, in order (`worker.neurons.union`); else nothing.
    """

    active: I32
    scores: F32 | None = None
    threshold: float = 0.0
    then: Callable[[], None] = _nothing
    pieces: tuple[I32, ...] = ()


Choose = Callable[[MicroBatch], NeuronChoice | None]
"""The active neurons of a block for a micro-batch; None: all are computed, as that was faster for so many tokens."""


@dataclass(frozen=True, eq=False)
class HybridFfn:
    """A `worker.node.segment.Segment`: all neurons of a block in the host's memory, some in the accelerator's arena.

    `device` is the host and `spec` of all neurons; `beside` computes on the accelerator, begun by `launch`. What either
    takes is told by `clock`, in seconds of the calling thread: an emulated accelerator's has its own time. `measured`
    gives the share from which on all neurons of these bytes are faster for such an input, on the host.
    """

    device: Device
    spec: FfnSpec
    beside: Device
    launch: Launch
    arena: LayerArena
    choose: Choose
    clock: Callable[[], float] = time.perf_counter
    fallback: DenseFallback = field(default_factory=DenseFallback)
    layer: int = 0
    measured: Callable[[Bytes, Input], float] | None = None

    @property
    def empty(self) -> bool:
        """See `Segment.empty`."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; all is computed with the output."""
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
        if len(part.x) <= HABITS:
            self.arena.note(chosen.active)
        if not self._pays(held, len(part.x)):
            held.give_up()
            chosen.then()
            return whole.start(phases, data, part, take)
        pending = self._there(held, part, take)
        chosen.then()
        pending += self._here(held, data, part, take)
        return Merged(pending) if pending else Finished(lambda: np.zeros_like(part.x))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`; a chain computes all neurons."""
        return ChainBlock(self.spec, data, residual)

    def _measure(self, data: Bytes, part: MicroBatch) -> None:
        """Find out from which share on all are faster, with the first step of about so many tokens."""
        if (measured := self.measured) is not None:
            kernels = self.device.kernels
            self.fallback.limit(len(part.x), lambda: measured(data, part.prepared(self.spec, self.device, kernels)))

    def _pays(self, held: HeldNeurons, tokens: int) -> bool:
        count = self.spec.neuron.units * self.spec.neuron.width
        paid = self.fallback.pays(len(held.slots), len(held.here), count, self.arena.lines(tokens), tokens)
        self.fallback.note(self.layer, tokens, paid)
        return paid

    @cached_property
    def _slots(self) -> FfnSpec:
        """The slots as a run of their own, without biases."""
        neuron = self.spec.neuron
        units = len(self.arena.slots) // neuron.width
        return replace(self.spec, neuron=replace(neuron, units=units), gate_bias=None, up_bias=None)

    def _spec_of(self, held: HeldNeurons) -> FfnSpec:
        """With the biases where their neurons lie now."""
        given = self.spec
        if given.gate_bias is None and given.up_bias is None:
            return self._slots
        count = len(self.arena.slots)
        gate, up = (_placed(bias, held, count) for bias in (given.gate_bias, given.up_bias))
        return replace(self._slots, gate_bias=gate, up_bias=up)

    def _there(self, held: HeldNeurons, part: MicroBatch, take: Take) -> list[Pending[F32]]:
        """The accelerator's part, begun; the slots are given back when it has used them."""
        if not len(held.slots):
            return []
        spec, kernels, arena = self._spec_of(held), self.beside.kernels, self.arena
        try:
            x = take(FfnSegment(self.beside, self.launch, spec))
        except BaseException:
            held.release()
            raise

        def call() -> F32:
            try:
                began = self.clock()
                found = kernels.ffn(spec, arena.data, x, held.slots)
                arena.took_there(len(held.slots), self.clock() - began, len(part.x))
                return found
            finally:
                held.release()

        return [self.launch(call)]

    def _here(self, held: HeldNeurons, data: Bytes, part: MicroBatch, take: Take) -> list[Pending[F32]]:
        """The CPU's part, computed in this thread."""
        if not len(held.here):
            return []
        spec, kernels, x = self.spec, self.device.kernels, take(self)

        def call() -> F32:
            began = self.clock()
            found = kernels.ffn(spec, data, x, held.here)
            self.arena.took_here(len(held.here), self.clock() - began, len(part.x))
            return found

        return [self.device.start(call)]


class Merged:
    """The sum of what was begun: a `tpi.devices.base.Pending`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Pending[F32]]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """See `Pending.done`."""
        return all(part.done for part in self._parts)

    def wait(self) -> F32:
        """See `Pending.wait`; the accelerator's part first, so that sums do not depend on who is sooner."""
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
