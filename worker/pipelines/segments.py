"""Segments of a batch's pipeline: they begin a call and wait for nothing, whatever it needs is awaited in the call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Event, Finished, Pending
from tpi.kernels.heads import finished, squares
from tpi.kernels.spec import Input, Projected, Routing
from tpi.kv import KvPages
from tpi.pack.layout import GROUP
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase
from worker.node.segment import AttentionSegment, ExpertsSegment, FfnSegment, Phases, Segment, Take
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.micro import LiftedMicroBatch
from worker.pipelines.visiting import VisitingPages

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Crossed = tuple[Any, Event]
"""Heads, or what attention made of them, and the end of their crossing."""
ExpertsCall = Callable[[Input, Routing], F32]
"""A block's experts, for its input and what its tokens chose."""


@dataclass(frozen=True, eq=False)
class BatchAttention(AttentionSegment):
    """Attention whose products are the accelerator's; who attends is said by the micro-batch.

    The host attends in its own thread, with pages that live in its memory (`home`); the accelerator with pages that
    visit it, or with its own (`pages`).
    """

    lanes: BatchLanes
    home: KvPages
    visiting: VisitingPages | None  # None: keys and values live on the accelerator

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `worker.node.segment.Segment.start`."""
        assert isinstance(part, LiftedMicroBatch)
        if self.empty:
            return super().start(phases, data, part, take)
        if Phase.PROJECT in phases:
            part.follow()
            if not (part.attended_there and phases >= COMPUTE):
                part.between[self] = self._project(data, part, take)
        if part.attended_there:
            return self._attend_there(phases, data, part, take) if Phase.OUTPUT in phases else None
        if Phase.ATTEND in phases:
            part.between[self] = self._attend_here(part)
        return self._output(data, part) if Phase.OUTPUT in phases else None

    def squares(self, part: MicroBatch) -> F32:
        """See `AttentionSegment.squares`."""
        if self.empty:
            return np.zeros((len(part.x), 2 * GROUP), np.float32)
        heads, _ = part.between[self].wait()
        return squares(self.spec, heads)

    def finish(self, part: MicroBatch, sums: F32) -> None:
        """See `AttentionSegment.finish`."""
        if not self.empty:
            heads, crossed = part.between[self].wait()
            ready = finished(self.spec, heads, part.batch.positions, sums), crossed
            part.between[self] = Finished(lambda: ready)

    def _project(self, data: Bytes, part: LiftedMicroBatch, take: Take) -> Pending[Crossed]:
        """Heads; they cross to the host if it attends (D1 of section 4.1)."""

        def project() -> Crossed:
            heads = self.device.kernels.project(self.spec, data, take(self), part.batch.positions)
            nbytes = 0 if part.attended_there else _nbytes(heads)
            return heads, self.lanes.cross(nbytes, up=False) if nbytes else Finished(_nothing)

        return self.launch(project)

    def _attend_here(self, part: LiftedMicroBatch) -> Pending[Crossed]:
        """Attention by the host, whose result then crosses (D2)."""
        before, kernels = part.between[self], self.lanes.host.kernels

        def arrived() -> Projected:
            heads: Projected
            heads, crossed = before.wait()
            crossed.wait()
            return heads

        def attend(heads: Projected) -> Crossed:
            with self.home.hold(self.layer, part.batch) as (keys, values):
                mixed = kernels.attend(self.spec, heads, keys, values, part.batch)
            return mixed, self.lanes.cross(mixed.nbytes, up=True)

        return self.lanes.attend(f"attention {self.layer}", arrived, attend)

    def _output(self, data: Bytes, part: LiftedMicroBatch) -> Pending[F32]:
        attended = part.between.pop(self)

        def arrived() -> F32:
            mixed: F32
            mixed, crossed = attended.wait()
            crossed.wait()
            return mixed

        ready = self.device.start(arrived)  # a call of its own: waiting is no computing to who traces these
        return self.launch(lambda: self.device.kernels.output(self.spec, data, ready.wait()))

    def _attend_there(self, phases: Phases, data: Bytes, part: LiftedMicroBatch, take: Take) -> Pending[F32]:
        """All of it on the accelerator, but for heads that are there already."""
        heads = part.between.pop(self, None)
        held = self.pages.hold(self.layer, part.batch) if self.visiting is None else None
        if held is not None:
            with held as (keys, values):
                return self._attention(data, part, take, heads, (keys, values, part.batch))
        assert self.visiting is not None
        with self.visiting.hold(self.layer, part.number) as visit:
            return self._attention(data, part, take, heads, visit)

    def _attention(
        self, data: Bytes, part: LiftedMicroBatch, take: Take, heads: Pending[Any] | None, pages: Any
    ) -> Pending[F32]:
        keys, values, batch = pages
        spec, kernels = self.spec, self.device.kernels

        def attend() -> F32:
            if heads is None:
                return kernels.attention(spec, data, take(self), keys, values, batch)
            projected, _ = heads.wait()
            return kernels.output(spec, data, kernels.attend(spec, projected, keys, values, batch))

        return self.launch(attend)


@dataclass(frozen=True, eq=False)
class BatchFfn(FfnSegment):
    """Feed-forward neurons whose input is made in the call."""

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `worker.node.segment.Segment.start`."""
        if Phase.OUTPUT not in phases or self.empty:
            return super().start(phases, data, part, take)
        _follow(part)
        return self.launch(lambda: self.device.kernels.ffn(self.spec, data, take(self)))


@dataclass(frozen=True, eq=False)
class BatchExperts(ExpertsSegment):
    """Experts whose input and routing are made in the call."""

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """See `worker.node.segment.Segment.start`."""
        if Phase.OUTPUT not in phases or self.empty:
            return super().start(phases, data, part, take)
        router, kernels, call = self.spec.router, self.device.kernels, self.call(data)
        _follow(part)

        def experts() -> F32:
            x = take(self)
            return call(x, part.routed(router, kernels, x))

        return self.launch(experts)

    def call(self, data: Bytes) -> ExpertsCall:
        """What computes them with the weights that are held now."""
        return partial(self.device.kernels.experts, self.spec, data)


def for_batches(segment: Segment, lanes: BatchLanes, home: KvPages, visiting: VisitingPages | None) -> Segment:
    """The same segment, as the pipeline computes it."""
    if isinstance(segment, AttentionSegment):
        return BatchAttention(
            segment.device, segment.launch, segment.spec, segment.layer, segment.pages, lanes, home, visiting
        )
    if isinstance(segment, FfnSegment):
        return BatchFfn(segment.device, segment.launch, segment.spec)
    assert isinstance(segment, ExpertsSegment)
    return BatchExperts(segment.device, segment.launch, segment.spec)


def _follow(part: MicroBatch) -> None:
    assert isinstance(part, LiftedMicroBatch)
    part.follow()


def _nbytes(heads: Projected) -> int:
    return heads.queries.nbytes + heads.keys.nbytes + heads.values.nbytes


def _nothing() -> None:
    """Nothing crosses."""
