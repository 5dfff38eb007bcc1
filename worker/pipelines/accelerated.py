"""The accelerator of a node that computes batches: chunked rings for weights, copies of KV pages, and the pipeline."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace

from scheduler.weights import Hold
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages
from tpi.trace import NoTrace
from worker.accelerator.accelerated import Accelerators, LinkFigures
from worker.node.allocations import DeviceAllocations
from worker.node.division import Division
from worker.node.segment import ExpertsSegment, HeldPages, Segment
from worker.node_plan import NodePlan
from worker.pipelines.chunktable import gathered
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.longhold import LongHold, close_all
from worker.pipelines.pipeline import BatchPipeline, schedule_of
from worker.pipelines.segments import for_batches
from worker.pipelines.visiting import PageBuffer, VisitingPages
from worker.plan.modes.batch import BatchSettings, buffer_pages
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment

_MB = 1e6


class BatchAccelerated(Accelerators):
    """The accelerator of a node that computes batches by the settings of `worker.plan.modes.batch`."""

    def __init__(
        self,
        devices: Sequence[Device],
        plan: NodePlan,
        residence: Residence,
        allocations: DeviceAllocations,
        trace: NoTrace,
    ) -> None:
        """Allocate the accelerator's memory.

        Args:
            devices: the host and the accelerator.
            plan: the node's part of the deployment.
            residence: where its weights lie, in the mode "batch".
            allocations: allocates memory on devices.
            trace: recorder of transfers.

        Raises:
            DeviceFullError: if the accelerator does not have enough memory.
        """
        host, device = devices
        self.settings: BatchSettings = residence.details
        self.lanes = BatchLanes(device, host, trace, self.settings.policy.adds_there)
        self._holds: dict[int, list[LongHold]] = {}
        self._chunk = self.settings.chunk_bytes
        super().__init__(devices, plan, residence, allocations, trace)
        with ExitStack() as stack:
            stack.enter_context(closing(self))
            self.visiting = self._visiting_pages()
            stack.pop_all()
        policy, blocks, agreed = self.settings.policy, plan.blocks, plan.options.batch if plan.size > 1 else None
        attends = tuple(block.kind == "attention" for block in blocks)
        self.pipeline = BatchPipeline(
            self.lanes,
            attends,
            tuple(block.layer for block in blocks),
            self.visiting,
            schedule_of(attends, policy, agreed),
            self.settings.problem.chunk,
            self._starts,
            self._holds,
            buffer_pages(plan, policy.micro_batch) if agreed else 0,
        )

    @property
    def division(self) -> Division:
        """The pipeline, which divides steps into micro-batches."""
        return self.pipeline

    @property
    def figures(self) -> LinkFigures:
        """The traffic over the link since the start."""
        moved = self.visiting.moved_bytes if self.visiting else 0
        return replace(super().figures, kv_bytes=moved)

    def describe(self) -> str:
        """Return a sentence, without a full stop, about the plan and the traffic over the link."""
        policy, moved = self.settings.policy, self.figures
        side = "the accelerator" if policy.attention_there else "the host"
        attention = f"both attend, {side} to what is in host memory" if policy.divided else f"{side} attends"
        stay = f"{policy.weights_kept:.0%} of the weights and {policy.kv_kept:.0%} of the keys and values stay on it"
        return (
            f"{self.device.name} computes batches of {policy.batch} in micro-batches of {policy.micro_batch}, "
            f"{attention}; {stay}; "
            f"{moved.weight_bytes / _MB:.0f} MB of weights and {moved.kv_bytes / _MB:.0f} MB of keys and values moved"
        )

    def adapt_segment(self, segment: Segment) -> Segment:
        """Return a segment of the same units as `segment` that queues its work for the pipeline."""
        return for_batches(segment, self.lanes, self.host_pages, self.visiting, self.settings.card_kv_heads)

    def abandon(self) -> None:
        """Abort the step: end all holds and discard all transfers, failed ones included."""
        for holds in self._holds.values():
            close_all(holds)
        super().abandon()
        if self.visiting is not None:
            self.visiting.abandon()

    def wait_idle(self) -> None:
        """Wait for all transfers in flight, transfers of KV pages included."""
        super().wait_idle()
        if self.visiting is not None:
            self.visiting.wait_saved()

    def hold(self, piece: int, short: bool) -> AbstractContextManager[Bytes]:
        """Return a hold of a streamed piece that lasts from the piece's first use in a step to its last."""
        hold = LongHold(super().hold(piece, short))
        self._holds.setdefault(self.offload.pieces[piece].block.number, []).append(hold)
        return hold

    def gather(self, segment: Segment, parts: Sequence[tuple[NodeSegment, Hold]]) -> tuple[Segment, Hold]:
        """Return experts whose chunks lie in several places as one segment, with one hold for all chunks."""
        mixture = self._plan.config.mixture
        assert isinstance(segment, ExpertsSegment)
        assert mixture is not None
        return gathered(segment, parts, mixture.experts)

    def close(self) -> None:
        """Stop all transfers and join all threads, also the threads of the lanes. Further calls do nothing."""
        super().close()
        self.lanes.close()

    def _opened(self, count: int) -> Mapping[int, HeldPages]:
        """Allocate `count` KV pages per layer for the heads whose keys and values stay on the accelerator, if any."""
        layers, heads = self.offload.layers, self.settings.card_kv_heads
        return (
            dict.fromkeys(layers, self._allocations.pages(self.device, self._plan, layers, count, heads))
            if heads
            else {}
        )

    def _starts(self, host_attends: bool) -> None:
        """Prepare for a step: if the host computes attention in it, wait until its memory has all pages."""
        if host_attends and self.visiting is not None:
            self.visiting.wait_saved()

    def _visiting_pages(self) -> VisitingPages | None:
        heads, numbers, pages = self.offload.host_kv_heads, range(self.settings.buffers), self.settings.buffer_pages
        if not numbers or heads is None:
            return None
        on_card = self._allocations.pages(self.device, self._plan, numbers, pages, heads)
        dim, dtype = self._plan.config.head_dim, self._plan.options.kv_dtype
        staged = KvPages.allocate(numbers, pages, heads, dim, dtype, self.device.staging)
        rooms = [
            PageBuffer(on_card.keys[at], on_card.values[at], (staged.keys[at], staged.values[at])) for at in numbers
        ]
        return VisitingPages(self.device, self.host_pages, rooms, self._queue)
