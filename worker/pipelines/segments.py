"""Segments of a batch's pipeline: they begin a call and wait for nothing, whatever it needs is awaited in the call."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Event, Finished, Pending
from tpi.kernels import Kernels
from tpi.kernels.heads import finished, squares
from tpi.kernels.spec import Batch, Input, KvArray, Projected, Routing
from tpi.kv import KvPages
from tpi.pack.layout import GROUP
from tpi.partition import Range
from worker.node.heads import SomeHeads, put_together, some_heads
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase
from worker.node.segment import AttentionSegment, ExpertsSegment, FfnSegment, Phases, Segment, Take
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.micro import LiftedMicroBatch
from worker.pipelines.visiting import VisitingPages

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Paged = tuple[KvArray, KvArray, Batch]
"""Keys and values, and the batch by whose numbers they are found."""
Crossed = tuple[Any, Event]
"""Heads, or what attention made of them, and the end of their crossing."""
ExpertsCall = Callable[[Input, Routing], F32]
"""A block's experts, for its input and what its tokens chose."""


@dataclass(frozen=True, eq=False)
class BatchAttention(AttentionSegment):
    """Attention whose products are the accelerator's.

    With the heads that are `kept` the accelerator always attends, with pages of its own (`pages`). Who does with the
    `others` is said by the micro-batch: the host in its own thread, with pages that live in its memory (`home`), or the
    accelerator, with pages that visit it.
    """

    lanes: BatchLanes
    home: KvPages
    visiting: VisitingPages | None  # None: all keys and values live on the accelerator
    kept: SomeHeads | None
    others: SomeHeads | None

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
            if self.kept is not None:
                part.between[self, "kept"] = self._attend_kept(self.kept, part)
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
        """Heads; those that the host attends with cross to it (D1 of section 4.1)."""
        crossing = None if part.attended_there else self.others

        def project() -> Crossed:
            heads = self.device.kernels.project(self.spec, data, take(self), part.batch.positions)
            nbytes = crossing.nbytes(heads) if crossing else 0
            return heads, self.lanes.cross(nbytes, up=False) if nbytes else Finished(_nothing)

        return self.launch(project)

    def _attend_kept(self, kept: SomeHeads, part: LiftedMicroBatch) -> Pending[F32]:
        """Attention by the accelerator with what lives there, while the host attends with the others."""
        before, kernels = part.between[self], self.device.kernels
        with self.pages.hold(self.layer, part.batch) as (keys, values):
            return self.launch(lambda: _attended(kernels, kept, before.wait()[0], (keys, values, part.batch)))

    def _attend_here(self, part: LiftedMicroBatch) -> Pending[Crossed]:
        """Attention by the host, whose result then crosses (D2)."""
        before, kernels, others = part.between[self], self.lanes.host.kernels, self.others
        assert others is not None  # with nothing in its memory it does not attend

        def arrived() -> Projected:
            heads: Projected
            heads, crossed = before.wait()
            crossed.wait()
            return heads

        def attend(heads: Projected) -> Crossed:
            with self.home.hold(self.layer, part.batch) as (keys, values):
                mixed = _attended(kernels, others, heads, (keys, values, part.batch))
            return mixed, self.lanes.cross(mixed.nbytes, up=True)

        return self.lanes.attend(f"attention {self.layer}", arrived, attend)

    def _output(self, data: Bytes, part: LiftedMicroBatch) -> Pending[F32]:
        attended, kept = part.between.pop(self), part.between.pop((self, "kept"), None)

        def arrived() -> F32:
            mixed: F32
            mixed, crossed = attended.wait()
            crossed.wait()
            return mixed

        ready = self.device.start(arrived)  # a call of its own: waiting is no computing to who traces these

        def output() -> F32:
            mixed = ready.wait() if kept is None else put_together(kept.wait(), ready.wait())
            return self.device.kernels.output(self.spec, data, mixed)

        return self.launch(output)

    def _attend_there(self, phases: Phases, data: Bytes, part: LiftedMicroBatch, take: Take) -> Pending[F32]:
        """All of it on the accelerator, but for heads that are there already."""
        heads = part.between.pop(self, None)
        with ExitStack() as held:
            attending: list[tuple[SomeHeads, Paged]] = []
            if self.kept is not None:
                keys, values = held.enter_context(self.pages.hold(self.layer, part.batch))
                attending.append((self.kept, (keys, values, part.batch)))
            if self.others is not None:
                assert self.visiting is not None
                attending.append((self.others, held.enter_context(self.visiting.hold(self.layer, part.number))))
            return self._attention(data, part, take, heads, attending)

    def _attention(
        self,
        data: Bytes,
        part: LiftedMicroBatch,
        take: Take,
        heads: Pending[Any] | None,
        attending: Sequence[tuple[SomeHeads, Paged]],
    ) -> Pending[F32]:
        """With all heads in one call, or with some after the others."""
        spec, kernels = self.spec, self.device.kernels

        def attend() -> F32:
            if heads is None and len(attending) == 1:
                ((_, pages),) = attending
                return kernels.attention(spec, data, take(self), *pages)
            projected = heads.wait()[0] if heads else kernels.project(spec, data, take(self), part.batch.positions)
            mixed = [_attended(kernels, some, projected, pages) for some, pages in attending]
            return kernels.output(spec, data, mixed[0] if len(mixed) == 1 else put_together(*mixed))

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


def for_batches(
    segment: Segment, lanes: BatchLanes, home: KvPages, visiting: VisitingPages | None, kept: int = 0
) -> Segment:
    """The same segment, as the pipeline computes it; keys and values of the first `kept` heads live there."""
    if isinstance(segment, AttentionSegment):
        spec, every = segment.spec, segment.spec.kv_heads
        parts = (some_heads(spec, Range(0, min(kept, every))), some_heads(spec, Range(min(kept, every), every)))
        return BatchAttention(
            segment.device, segment.launch, spec, segment.layer, segment.pages, lanes, home, visiting, *parts
        )
    if isinstance(segment, FfnSegment):
        return BatchFfn(segment.device, segment.launch, segment.spec)
    assert isinstance(segment, ExpertsSegment)
    return BatchExperts(segment.device, segment.launch, segment.spec)


def _follow(part: MicroBatch) -> None:
    assert isinstance(part, LiftedMicroBatch)
    part.follow()


def _attended(kernels: Kernels, some: SomeHeads, projected: Projected, pages: Paged) -> F32:
    """What attention makes of some of the heads, `[tokens, their values]`."""
    own = projected if some.spec.kv_heads == projected.keys.shape[1] else some.of(projected)
    return kernels.attend(some.spec, own, *pages)


def _nothing() -> None:
    """Nothing crosses."""
