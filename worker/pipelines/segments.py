"""Segments for batches. They start calls without waiting; each call itself waits for its input."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.devices.base import Event, Finished, Pending
from tpi.kernels import Kernels
from tpi.kernels.heads import apply_norms_and_rope, squares
from tpi.kernels.kv import KvPages
from tpi.kernels.spec import AttentionSpec, Batch, Input, KvArray, Projected, Routing
from tpi.pack.layout import GROUP
from tpi.partition import Range
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE, Phase
from worker.node.segment import AttentionSegment, ExpertsSegment, FfnSegment, Phases, Segment, Take
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.micro import QueuedMicroBatch
from worker.pipelines.visiting import VisitingPages

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Paged = tuple[KvArray, KvArray, Batch]
"""The arrays of keys and of values, and the batch with the numbers of the pages to use."""
Crossed = tuple[Any, Event]
"""Projected heads or the result of attention, and the event of their transfer over the link."""
ExpertsCall = Callable[[Input, Routing], F32]
"""A call that computes a block's experts from its input and the routing of its tokens."""


@dataclass(frozen=True, eq=False)
class HeadRange:
    """A range of an attention block's KV heads, with the query heads that attend to them."""

    spec: AttentionSpec  # of these heads only; for `Kernels.attend`
    queries: Range  # among all query heads of the block
    kv: Range  # among all KV heads of the block

    def of(self, projected: Projected) -> Projected:
        """Return the queries, keys and values of these heads as contiguous arrays; `projected` has all heads."""
        own = self._views(projected)
        return Projected(*(np.ascontiguousarray(heads) for heads in (own.queries, own.keys, own.values)))

    def nbytes(self, projected: Projected) -> int:
        """Return the size of these heads' queries, keys and values in bytes."""
        own = self._views(projected)
        return own.queries.nbytes + own.keys.nbytes + own.values.nbytes

    def _views(self, projected: Projected) -> Projected:
        queries, kv = (slice(each.first, each.last) for each in (self.queries, self.kv))
        return Projected(projected.queries[:, queries], projected.keys[:, kv], projected.values[:, kv])


def some_heads(spec: AttentionSpec, kv: Range) -> HeadRange | None:
    """Return the KV heads `kv` with their query heads, or None if `kv` is empty.

    The result's spec lacks the parts that only projection needs: biases, norms, and, unless attention is latent, the
    rotary frequencies.
    """
    first, last = np.searchsorted(spec.kv_index, (kv.first, kv.last)).tolist()
    if not len(kv):
        return None
    if len(kv) == spec.kv_heads:
        return HeadRange(spec, Range(first, last), kv)
    own = replace(
        spec,
        heads=last - first,
        kv_heads=len(kv),
        kv_index=spec.kv_index[first:last] - np.int32(kv.first),
        sinks=None if spec.sinks is None else np.ascontiguousarray(spec.sinks[first:last]),
        q_bias=None, k_bias=None, v_bias=None, q_norm=None, k_norm=None, v_norm=None, whole=None,
        inv_freq=spec.inv_freq if spec.latent else np.empty(0, np.float32),
    )  # fmt: skip
    return HeadRange(own, Range(first, last), kv)


def concatenate_heads(kept: F32, others: F32) -> F32:
    """Return the attention results of the first heads and of the others, `[tokens, heads * head_dim]`, as one array."""
    return np.concatenate([kept, others], axis=1)


@dataclass(frozen=True, eq=False)
class BatchAttention(AttentionSegment):
    """Attention whose products with weights the accelerator computes.

    Attributes:
        lanes: the accelerator, and the host's threads.
        host_pages: KV pages in host memory.
        visiting: copies these pages to the accelerator when needed; None if all keys and values are resident there.
        resident_heads: heads whose keys and values are resident on the accelerator, which always computes their
            attention.
        host_heads: heads whose keys and values are in host memory. The micro-batch says whether the host computes their
            attention, in a thread of its own, or the accelerator, with visiting pages.
    """

    lanes: BatchLanes
    host_pages: KvPages
    visiting: VisitingPages | None
    resident_heads: HeadRange | None
    host_heads: HeadRange | None

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start `phases` of attention for a micro-batch.

        Return the pending partial result `[tokens, hidden]` if `phases` include OUTPUT, else None. `take` returns the
        block's input for a segment.
        """
        assert isinstance(part, QueuedMicroBatch)
        if self.empty:
            return super().start(phases, data, part, take)
        if Phase.PROJECT in phases:
            part.follow()
            if not (part.attends_on_accelerator and phases >= COMPUTE):
                part.phase_results[self] = self._project(data, part, take)
        if part.attends_on_accelerator:
            return self._attend_on_card(phases, data, part, take) if Phase.OUTPUT in phases else None
        if Phase.ATTEND in phases:
            if self.resident_heads is not None:
                part.phase_results[self, "kept"] = self._attend_kept(self.resident_heads, part)
            part.phase_results[self] = self._attend_on_host(part)
        return self._output(data, part) if Phase.OUTPUT in phases else None

    def squares(self, part: MicroBatch) -> F32:
        """Return the sums of squares of this segment's queries and keys, `[tokens, 2 * GROUP]`, after PROJECT.

        They are needed for norms that span the heads of all nodes.
        """
        if self.empty:
            return np.zeros((len(part.x), 2 * GROUP), np.float32)
        heads, _ = part.phase_results[self].wait()
        return squares(self.spec, heads)

    def finish(self, part: MicroBatch, sums: F32) -> None:
        """Finish the micro-batch's queries and keys with `sums`, the sums of squares over all nodes."""
        if not self.empty:
            heads, crossed = part.phase_results[self].wait()
            ready = apply_norms_and_rope(self.spec, heads, part.batch.positions, sums), crossed
            part.phase_results[self] = Finished(lambda: ready)

    def _project(self, data: Bytes, part: QueuedMicroBatch, take: Take) -> Pending[Crossed]:
        """Start the projection to queries, keys and values; then transfer those of `host_heads` to the host.

        The transfer (D1 in MoE-Lightning, section 4.1) is needed only if the host computes attention.
        """
        crossing = None if part.attends_on_accelerator else self.host_heads

        def project() -> Crossed:
            heads = self.device.kernels.project(self.spec, data, take(self), part.batch.positions)
            nbytes = crossing.nbytes(heads) if crossing else 0
            return heads, self.lanes.transfer_activations(nbytes, up=False) if nbytes else Finished(lambda: None)

        return self.launch(project)

    def _attend_kept(self, kept: HeadRange, part: QueuedMicroBatch) -> Pending[F32]:
        """Start the accelerator's attention for the heads `kept`, whose keys and values are resident on it.

        The host computes attention for the other heads.
        """
        before, kernels = part.phase_results[self], self.device.kernels
        with self.pages.hold(self.layer, part.batch) as (keys, values):
            return self.launch(lambda: _attended(kernels, kept, before.wait()[0], (keys, values, part.batch)))

    def _attend_on_host(self, part: QueuedMicroBatch) -> Pending[Crossed]:
        """Start the host's attention, and then the transfer of its result to the accelerator (D2)."""
        before, kernels, others = part.phase_results[self], self.lanes.host.kernels, self.host_heads
        assert others is not None  # the host attends only for keys and values in its memory

        def arrived() -> Projected:
            heads: Projected
            heads, crossed = before.wait()
            crossed.wait()
            return heads

        def attend(heads: Projected) -> Crossed:
            with self.host_pages.hold(self.layer, part.batch) as (keys, values):
                mixed = _attended(kernels, others, heads, (keys, values, part.batch))
            return mixed, self.lanes.transfer_activations(mixed.nbytes, up=True)

        return self.lanes.attend(f"attention {self.layer}", arrived, attend)

    def _output(self, data: Bytes, part: QueuedMicroBatch) -> Pending[F32]:
        """Queue the product with the output projection, which waits for the attention of all heads.

        Return its pending result, `[tokens, hidden]`.
        """
        attended, kept = part.phase_results.pop(self), part.phase_results.pop((self, "kept"), None)

        def arrived() -> F32:
            mixed: F32
            mixed, crossed = attended.wait()
            crossed.wait()
            return mixed

        ready = self.device.start(arrived)  # a separate call, so that traces do not show waiting as computing

        def output() -> F32:
            mixed = ready.wait() if kept is None else concatenate_heads(kept.wait(), ready.wait())
            return self.device.kernels.output(self.spec, data, mixed)

        return self.launch(output)

    def _attend_on_card(self, phases: Phases, data: Bytes, part: QueuedMicroBatch, take: Take) -> Pending[F32]:
        """Start all phases on the accelerator, or only those after the projection if heads are projected already."""
        heads = part.phase_results.pop(self, None)
        with ExitStack() as held:
            attending: list[tuple[HeadRange, Paged]] = []
            if self.resident_heads is not None:
                keys, values = held.enter_context(self.pages.hold(self.layer, part.batch))
                attending.append((self.resident_heads, (keys, values, part.batch)))
            if self.host_heads is not None:
                assert self.visiting is not None
                attending.append((self.host_heads, held.enter_context(self.visiting.hold(self.layer, part.number))))
            return self._attention(data, part, take, heads, attending)

    def _attention(
        self,
        data: Bytes,
        part: QueuedMicroBatch,
        take: Take,
        heads: Pending[Any] | None,
        attending: Sequence[tuple[HeadRange, Paged]],
    ) -> Pending[F32]:
        """Start one call that computes attention for each group of heads in turn, and then the output projection.

        Args:
            data: the weights of the segment.
            part: the micro-batch.
            take: returns the block's input for a segment.
            heads: the pending projected heads; None: the call projects them first.
            attending: each group of heads, with the keys and values that it reads on the accelerator.
        """
        spec, kernels = self.spec, self.device.kernels

        def attend() -> F32:
            if heads is None and len(attending) == 1:
                ((_, pages),) = attending
                return kernels.attention(spec, data, take(self), *pages)
            projected = heads.wait()[0] if heads else kernels.project(spec, data, take(self), part.batch.positions)
            mixed = [_attended(kernels, some, projected, pages) for some, pages in attending]
            return kernels.output(spec, data, mixed[0] if len(mixed) == 1 else concatenate_heads(*mixed))

        return self.launch(attend)


@dataclass(frozen=True, eq=False)
class BatchFfn(FfnSegment):
    """Feed-forward neurons whose input is prepared in the call that computes them."""

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the whole computation for a micro-batch if `phases` include OUTPUT; otherwise do nothing.

        Return the pending partial result `[tokens, hidden]`. `take` returns the block's input for a segment.
        """
        if Phase.OUTPUT not in phases or self.empty:
            return super().start(phases, data, part, take)
        _follow(part)
        return self.launch(lambda: self.device.kernels.ffn(self.spec, data, take(self)))


@dataclass(frozen=True, eq=False)
class BatchExperts(ExpertsSegment):
    """Experts whose input and routing are prepared in the call that computes them."""

    def start(self, phases: Phases, data: Bytes, part: MicroBatch, take: Take) -> Pending[F32] | None:
        """Start the whole computation for a micro-batch if `phases` include OUTPUT; otherwise do nothing.

        Return the pending partial result `[tokens, hidden]`. `take` returns the block's input for a segment.
        """
        if Phase.OUTPUT not in phases or self.empty:
            return super().start(phases, data, part, take)
        router, kernels, call = self.spec.router, self.device.kernels, self.call(data)
        _follow(part)

        def experts() -> F32:
            x = take(self)
            return call(x, part.routed(router, kernels, x))

        return self.launch(experts)

    def call(self, data: Bytes) -> ExpertsCall:
        """Return a call that computes the experts with the weights `data`."""
        return partial(self.device.kernels.experts, self.spec, data)


def for_batches(
    segment: Segment, lanes: BatchLanes, home: KvPages, visiting: VisitingPages | None, kept: int = 0
) -> Segment:
    """Return a segment that computes the same units as `segment`, but queues its calls instead of waiting for input.

    Args:
        segment: a segment of the accelerator.
        lanes: the accelerator, and the host's threads.
        home: KV pages in host memory.
        visiting: copies these pages to the accelerator; None if all keys and values are resident there.
        kept: the number of KV heads, from the first on, whose keys and values are resident on the accelerator.
    """
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
    assert isinstance(part, QueuedMicroBatch)
    part.follow()


def _attended(kernels: Kernels, some: HeadRange, projected: Projected, pages: Paged) -> F32:
    """Return the result of attention for the heads `some`, `[tokens, heads * head_dim]`."""
    own = projected if some.spec.kv_heads == projected.keys.shape[1] else some.of(projected)
    return kernels.attend(some.spec, own, *pages)
