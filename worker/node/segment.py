"""Segments as a node computes them: some of a block's units on one device, phase by phase or all at once.

A segment knows its units' static shape (a kernel spec). The weights are handed in for each call as one buffer of bytes,
because they come and go. No I/O here, and nothing of ranks or sockets.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tpi.block import Vectors, attention_spec, experts_spec, ffn_spec
from tpi.config import ModelConfig
from tpi.devices.base import Device, Finished, Pending
from tpi.kernels.heads import finished, needs_sums, squares
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
    Residual,
)
from tpi.pack.layout import GROUP, RunLayout
from tpi.partition import Range
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Phases = frozenset[Phase]
Take = Callable[["Segment"], Input]
"""The input of the segment's block, as its device takes it."""
Launch = Callable[[Callable[[], Any]], Pending[Any]]
"""`tpi.devices.base.Device.start`, under a trace or not."""


class Segment(Protocol):
    """Some of a block's units on one device."""

    @property
    def device(self) -> Device:
        """What computes it."""
        ...

    @property
    def spec(self) -> BlockSpec:
        """What its device's kernels are told of it."""
        ...

    @property
    def empty(self) -> bool:
        """Whether it has no units."""
        ...

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Begin `phases` for a micro-batch; what comes of the last, its output, is `[tokens, hidden]` before the sum.

        `take(self)` gives the block's input.
        """
        ...

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """The segment as a part of a chain, where it is all of its block."""
        ...


class HeldPages(Protocol):
    """Pages of keys and values, where a device attends to them."""

    def hold(self, layer: int, batch: Batch) -> AbstractContextManager[tuple[KvArray, KvArray]]:
        """The pages of `layer` for a call that is started inside the `with`, and appends the tokens of `batch`."""
        ...


@dataclass(frozen=True, eq=False)
class AttentionSegment:
    """Query heads of `layer`, and the KV heads that they attend to, whose `pages` are held for `device`."""

    device: Device
    launch: Launch
    spec: AttentionSpec
    layer: int
    pages: HeldPages

    @property
    def empty(self) -> bool:
        """See `Segment.empty`."""
        return self.spec.heads == 0

    @property
    def waits(self) -> bool:
        """Whether its heads need a sum over all nodes between PROJECT and ATTEND: see `squares` and `finish`."""
        return needs_sums(self.spec)

    def squares(self, part: MicroBatch) -> F32:
        """After PROJECT, this node's part of that sum."""
        if self.empty:
            return np.zeros((len(part.x), 2 * GROUP), np.float32)
        return squares(self.spec, part.between[self].wait())

    def finish(self, part: MicroBatch, sums: F32) -> None:
        """The sum is there: heads are ready to attend."""
        if not self.empty:
            heads = finished(self.spec, part.between[self].wait(), part.batch.positions, sums)
            part.between[self] = Finished(lambda: heads)

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; this step's keys and values are appended to the pages."""
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
            mixed: Any = part.between.pop(self)
            return self.launch(lambda: kernels.output(spec, data, mixed.wait()))
        return None

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`."""
        with self.pages.hold(self.layer, NO_TOKENS) as (keys, values):
            return ChainBlock(self.spec, data, residual, keys, values)

    def _then(self, part: MicroBatch, call: Callable[[Any], object]) -> None:
        """Begin the next phase, with what the one before came to; a device does one thing after the other."""
        before: Any = part.between.get(self)
        part.between[self] = self.launch(lambda: call(before.wait() if before else None))


@dataclass(frozen=True, eq=False)
class FfnSegment:
    """Feed-forward neurons."""

    device: Device
    launch: Launch
    spec: FfnSpec

    @property
    def empty(self) -> bool:
        """See `Segment.empty`."""
        return self.spec.neuron.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; all is computed with the output."""
        if Phase.OUTPUT not in phases:
            return None
        if self.empty:
            return _nothing(part)
        spec, kernels, x = self.spec, self.device.kernels, take(self)
        return self.launch(lambda: kernels.ffn(spec, data, x))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`."""
        return ChainBlock(self.spec, data, residual)


@dataclass(frozen=True, eq=False)
class ExpertsSegment:
    """Feed-forward neurons of experts: a token passes those that it chose."""

    device: Device
    launch: Launch
    spec: ExpertsSpec

    @property
    def empty(self) -> bool:
        """See `Segment.empty`."""
        return self.spec.units == 0

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `Segment.start`; tokens choose once for all segments of a block."""
        if Phase.OUTPUT not in phases:
            return None
        if self.empty:
            return _nothing(part)
        spec, kernels, x = self.spec, self.device.kernels, take(self)
        routing = part.routed(spec.router, kernels, x)
        return self.launch(lambda: kernels.experts(spec, data, x, routing))

    def chained(self, data: Bytes, residual: Residual) -> ChainBlock:
        """See `Segment.chained`."""
        return ChainBlock(self.spec, data, residual)


Runs = Sequence[tuple[RunLayout, Range]]
"""The units that a segment has of its block, in the order of their bytes, and the layout of the whole run of each."""


def open_segment(
    device: Device,
    config: ModelConfig,
    layer: int,
    runs: Runs,
    vectors: Vectors,
    pages: HeldPages,
    launch: Launch | None = None,
) -> Segment:
    """The segment of a block of `layer` that has these units; `vectors` are the block's, whole.

    `launch` starts its calls, in place of the device alone.
    """
    launch = launch or device.start
    names = [layout.name for layout, _ in runs]
    if "router" in vectors:
        shared = next((run for run in runs if run[0].name == "shared"), None)
        routed = [run for run in runs if run[0].name == "neuron"]
        layout, ranges = (routed or runs)[-1][0], [units for _, units in routed]
        return ExpertsSegment(device, launch, experts_spec(config, layout, ranges, shared, vectors))
    if names[-1] == "neuron":
        layout, units = runs[-1]
        gate = runs[0][0] if len(runs) > 1 else None
        return FfnSegment(device, launch, ffn_spec(config, layout, vectors, units, gate))
    *latent, (query, query_units), (kv, kv_units) = runs
    shared_by_heads = latent[0][0] if latent else None
    spec = attention_spec(config, layer, query, kv, vectors, query_units, kv_units, shared_by_heads)
    return AttentionSegment(device, launch, spec, layer, pages)


def _nothing(part: MicroBatch) -> Pending[F32]:
    return Finished(lambda: np.zeros_like(part.x))


def compute(segment: Segment, data: Bytes, x: F32, batch: Batch) -> F32:
    """What a segment alone comes to for `x` `[tokens, hidden]`, before any sum."""
    partial = segment.start(COMPUTE, data, MicroBatch(x, batch), lambda _: x)
    assert partial is not None  # all phases are there
    return partial.wait()
