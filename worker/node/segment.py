"""The computation of segments: some of a block's units on one device, phase by phase or all at once.

A segment has the static shape of its units (a kernel spec). Each call gets the weights as one buffer of bytes, because
streamed weights change their place. This module does no I/O, and does not depend on ranks or sockets.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tpi.block import Vectors, attention_spec, experts_spec, ffn_spec, recurrent_spec
from tpi.config import ModelConfig
from tpi.devices.base import Device, Finished, Pending
from tpi.kernels.heads import apply_norms_and_rope, needs_sums, squares
from tpi.kernels.recurrent.squares import square_rows
from tpi.kernels.spec import (
    NO_TOKENS,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    ExpertsSpec,
    FfnSpec,
    Input,
    KvArray,
    RecurrentSpec,
    Residual,
)
from tpi.pack.layout import GROUP, RunLayout
from tpi.partition import Range
from tpi.trace import OFF, NoTrace
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Phases = frozenset[Phase]
Take = Callable[["Segment"], Input]
"""A function that returns the input of the segment's block, in the form that the segment's device takes."""
Launch = Callable[[Callable[[], Any]], Pending[Any]]
"""A function that starts a computation: `tpi.devices.base.Device.start`, with or without a trace."""


def launching(device: Device, trace: NoTrace, name: str) -> Launch:
    """Return a function that starts calls on `device`, and records each call as a span called `name`."""
    if trace is OFF:
        return device.start

    def launch(call: Callable[[], Any]) -> Pending[Any]:
        def spanned() -> Any:
            with trace.span("accelerator", name):
                return call()

        return device.start(spanned)

    return launch


class Segment(Protocol):
    """Some of a block's units on one device."""

    @property
    def device(self) -> Device:
        """The device that computes the segment."""
        ...

    @property
    def spec(self) -> BlockSpec:
        """The shape of the segment's units, for the device's kernels."""
        ...

    @property
    def empty(self) -> bool:
        """True if the segment has no units."""
        ...

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start `phases` for a micro-batch. Return the segment's partial result if they include OUTPUT, else None.

        Args:
            phases: the phases to compute.
            data: the weights of the segment.
            part: the micro-batch.
            take: a function that returns the block's input for this segment.

        Returns:
            The pending partial result `[tokens, hidden]`, before the sum over segments and nodes.
        """
        ...

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the segment as a block of a chain: a sequence of blocks that one kernel call computes.

        The segment must have all units that this node has of the block. `residual` is the block's residual connection.
        """
        ...


class HeldPages(Protocol):
    """KV pages in memory that the device can use."""

    def hold(self, layer: int, batch: Batch) -> AbstractContextManager[tuple[KvArray, KvArray]]:
        """Return a context manager that yields the keys and values of `layer`.

        Start attention inside the `with` statement: it appends the tokens of `batch` to the pages.
        """
        ...


@dataclass(frozen=True, eq=False)
class AttentionSegment:
    """Query heads of a layer and the KV heads that they attend to, with the pages of `layer`, whose keys they read."""

    device: Device
    launch: Launch
    spec: AttentionSpec
    layer: int
    pages: HeldPages

    @property
    def empty(self) -> bool:
        """True if the segment has no heads."""
        return self.spec.heads == 0

    @property
    def waits(self) -> bool:
        """True if `squares` must be summed over all nodes and given to `finish` between PROJECT and ATTEND."""
        return needs_sums(self.spec)

    def squares(self, part: MicroBatch) -> F32:
        """Return the sums of squares of the projected heads, `[tokens, 2 * GROUP]`, for the norm over all nodes.

        Call it after PROJECT.
        """
        if self.empty:
            return np.zeros((len(part.x), 2 * GROUP), np.float32)
        return squares(self.spec, part.phase_results[self].wait())

    def finish(self, part: MicroBatch, sums: F32) -> None:
        """Apply norms, clipping and RoPE to the projected heads, with `sums`, the `squares` of all nodes together."""
        if not self.empty:
            heads = apply_norms_and_rope(self.spec, part.phase_results[self].wait(), part.batch.positions, sums)
            part.phase_results[self] = Finished(lambda: heads)

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start `phases` for a micro-batch; ATTEND appends the keys and values of its tokens to the pages."""
        if self.empty:
            return _nothing(part) if Phase.OUTPUT in phases else None
        spec, kernels, batch = self.spec, self.device.kernels, part.batch
        if phases >= COMPUTE:
            x = take(self)
            with self.pages.hold(self.layer, batch) as (keys, values):
                return self.launch(lambda: kernels.attention(spec, data, x, keys, values, batch))
        if Phase.PROJECT in phases:
            x = take(self)
            self._then(part, lambda _: kernels.project(spec, data, x, batch.positions))
        if Phase.ATTEND in phases:
            with self.pages.hold(self.layer, batch) as (keys, values):
                self._then(part, lambda projected: kernels.attend(spec, projected, keys, values, batch))
        if Phase.OUTPUT in phases:
            mixed: Any = part.phase_results.pop(self)
            return self.launch(lambda: kernels.output(spec, data, mixed.wait()))
        return None

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the heads and their pages as an attention block of a chain."""
        with self.pages.hold(self.layer, NO_TOKENS) as (keys, values):
            return ChainBlock(self.spec, data, residual, keys, values)

    def _then(self, part: MicroBatch, call: Callable[[Any], object]) -> None:
        """Start `call` with the result of the phase before it, and store its result for the next phase.

        `call` finds the earlier result ready, because a device runs its calls in sequence.
        """
        before: Any = part.phase_results.get(self)
        part.phase_results[self] = self.launch(lambda: call(before.wait() if before else None))


@dataclass(frozen=True, eq=False)
class RecurrentSegment:
    """Value heads (with the key heads that they need) or channels of a block with states, and the states."""

    device: Device
    launch: Launch
    spec: RecurrentSpec
    states: F32  # `[slots, values]`

    @property
    def empty(self) -> bool:
        """True if the segment has no units."""
        return self.spec.values.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the whole computation if `phases` include OUTPUT; it writes the states of the step's sequences."""
        if Phase.OUTPUT not in phases:
            return None
        if self.empty:
            return _nothing(part, square_rows(self.spec, len(part.x)))
        spec, kernels, x = self.spec, self.device.kernels, take(self)
        return self.launch(lambda: kernels.recur(spec, data, x, self.states, part.batch))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the units and their states as a block of a chain."""
        return ChainBlock(self.spec, data, residual, states=self.states)


@dataclass(frozen=True, eq=False)
class FfnSegment:
    """Feed-forward neurons of a dense block."""

    device: Device
    launch: Launch
    spec: FfnSpec

    @property
    def empty(self) -> bool:
        """True if the segment has no neurons."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the whole computation if `phases` include OUTPUT; otherwise do nothing."""
        if Phase.OUTPUT not in phases:
            return None
        if self.empty:
            return _nothing(part)
        spec, kernels, x = self.spec, self.device.kernels, take(self)
        return self.launch(lambda: kernels.ffn(spec, data, x))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the neurons as a feed-forward block of a chain."""
        return ChainBlock(self.spec, data, residual)


@dataclass(frozen=True, eq=False)
class ExpertsSegment:
    """Feed-forward neurons of a block of routed experts; each token uses the experts that the router chose for it."""

    device: Device
    launch: Launch
    spec: ExpertsSpec

    @property
    def empty(self) -> bool:
        """True if the segment has no neurons."""
        return self.spec.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the whole computation if `phases` include OUTPUT. All segments of a block use the same routing."""
        if Phase.OUTPUT not in phases:
            return None
        if self.empty:
            return _nothing(part)
        spec, kernels, x = self.spec, self.device.kernels, take(self)
        routing = part.routed(spec.router, kernels, x)
        return self.launch(lambda: kernels.experts(spec, data, x, routing))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """Return the experts as a feed-forward block of a chain."""
        return ChainBlock(self.spec, data, residual)


Runs = Sequence[tuple[RunLayout, Range]]
"""The layout of each run of the block, and the segment's units of that run, in the order of their bytes."""


def open_segment(
    device: Device,
    config: ModelConfig,
    layer: int,
    runs: Runs,
    vectors: Vectors,
    pages: HeldPages,
    launch: Launch | None = None,
    states: F32 | None = None,
    source: tuple[RunLayout, Range] | None = None,
) -> Segment:
    """Create the segment that computes the units `runs` of a block of `layer` on `device`.

    Args:
        device: computes the segment.
        config: configuration of the model.
        layer: number of the layer, from 0.
        runs: the segment's units.
        vectors: all vectors (norms, biases) of the block.
        pages: the KV pages, for attention.
        launch: starts the segment's computations; `device.start` by default.
        states: the states of the layer, `[slots, values]`, if it is recurrent.
        source: the run `kv` of the layer whose keys and values the layer reads, if it has none of its own.
    """
    launch = launch or device.start
    if "router" in vectors:
        shared = next((run for run in runs if run[0].name == "shared"), None)
        routed = [run for run in runs if run[0].name == "neuron"]
        layout, ranges = (routed or runs)[-1][0], [units for _, units in routed]
        return ExpertsSegment(device, launch, experts_spec(config, layout, ranges, shared, vectors))
    if runs[-1][0].name == "neuron":
        ((layout, units),) = runs
        return FfnSegment(device, launch, ffn_spec(config, layout, vectors, units))
    if runs[0][0].name == "value":
        spec = recurrent_spec(config, runs, vectors)
        assert states is not None  # a recurrent layer has states
        return RecurrentSegment(device, launch, spec, states)
    *latents, (query, query_units), (kv, kv_units) = runs if source is None else (*runs, source)
    before = [layout for layout, _ in latents]
    attends = attention_spec(config, layer, query, kv, vectors, query_units, kv_units, before)
    return AttentionSegment(device, launch, attends, config.kv_layer(layer), pages)


def _nothing(part: MicroBatch, further: int = 0) -> Pending[F32]:
    return Finished(lambda: np.zeros((len(part.x) + further, part.x.shape[1]), np.float32))
