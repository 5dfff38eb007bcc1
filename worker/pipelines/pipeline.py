"""The division of a step of a batch into micro-batches, the order of their tasks, and when KV pages are copied."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.model.roofline.latency import HOST_OVERLAP, PAGES_OVERLAP
from scheduler.model.roofline.policy import BatchPolicy
from tpi.kernels.spec import Batch
from tpi.net.fields import GroupBatch
from worker.node.microbatch import MicroBatch
from worker.node.order import Order, Phase, Visit, visits
from worker.pipelines.dividing import MicroBatchLimits, divided, is_decode
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.longhold import LongHold
from worker.pipelines.micro import QueuedMicroBatch
from worker.pipelines.orders import Interleaved, Layerwise
from worker.pipelines.visiting import VisitingPages

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Starts = Callable[[bool], None]
"""Called at the start of a step with True if the host attends; the keys and values must then be in host memory."""


@dataclass(frozen=True)
class BatchSchedule:
    """The settings for the computation of decode steps (one token of each sequence).

    Attributes:
        micro_batch: the largest number of sequences of a micro-batch.
        host_attends: True if the host computes attention; False: the accelerator, with KV pages copied to it.
        order: the order of the micro-batches' tasks.
        min_parts: the least number of micro-batches of a step, so that transfers and computations overlap. A step with
            fewer sequences than that has one micro-batch per sequence.
    """

    micro_batch: int
    host_attends: bool
    order: Order
    min_parts: int = 1


def schedule_of(attends: tuple[bool, ...], policy: BatchPolicy, group: GroupBatch | None = None) -> BatchSchedule:
    """Return MoE-Lightning's schedule for a policy: CGOPipe if the host computes attention, else S4 (figure 6).

    Args:
        attends: whether each block is attention.
        policy: the policy of this node.
        group: the settings of a group of several nodes. All of its nodes use the same order, whether the host or the
            accelerator attends on this node.
    """
    host_attends = not policy.attention_there
    ahead = host_attends if group is None else group.host_attends
    least = min(HOST_OVERLAP if ahead else PAGES_OVERLAP, policy.micro_batches)
    behind = 0 if group is None else 1
    order = Interleaved(attends, behind=behind) if ahead else Layerwise(attends)
    return BatchSchedule(policy.micro_batch, host_attends, order, least)


def reassemble(rows: Sequence[I64], parts: Sequence[F32]) -> F32:
    """Return the hidden states of a step's tokens in their order, `[tokens, hidden]`, float32.

    Args:
        rows: the indices of each micro-batch's tokens in the step.
        parts: the hidden states of each micro-batch, `[its tokens, hidden]`.
    """
    out = np.empty((sum(map(len, rows)), parts[0].shape[1]), np.float32)
    for own, part in zip(rows, parts, strict=True):
        out[own] = part
    return out


def set_visit_counts(found: Sequence[Visit], holds: Mapping[int, list[LongHold]]) -> None:
    """Set in each hold how many `with` statements of the coming step will enter it, so that it knows when to release.

    Args:
        found: all visits of the step, in order. A visit without jobs (only sums) needs no weights and is not counted.
        holds: the holds of weights, by block number.
    """
    counts = Counter(visit.block for visit in found if visit.jobs)
    for block, own in holds.items():
        for hold in own:
            hold.begin(counts[block])


@dataclass
class BatchPipeline:
    """A division of steps into micro-batches on a node with an accelerator.

    A step is a prompt step if it has several tokens of any sequence. Attention of prompts is computed on the
    accelerator, layer by layer for all micro-batches (MoE-Lightning, section 4).

    Attributes:
        lanes: the accelerator, and the host's threads.
        attends: whether each block is attention.
        layers: the number of the layer of each block.
        visiting: the KV pages that are copied to the accelerator for each micro-batch, if there are any.
        schedule: used for decode steps; may be replaced between two steps.
        chunk: the largest number of tokens of a prompt's micro-batch.
        on_start: called at the start of a step, with True if the host computes attention in it.
        holds: the holds of the streamed pieces of each block.
        pages: the largest number of KV pages of one micro-batch, the same on all nodes of a group; 0 for the limit of
            this node.
    """

    lanes: BatchLanes
    attends: tuple[bool, ...]
    layers: tuple[int, ...]
    visiting: VisitingPages | None
    schedule: BatchSchedule
    chunk: int
    on_start: Starts
    holds: Mapping[int, list[LongHold]] = field(default_factory=dict)
    pages: int = 0

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """Begin a step; return its micro-batches and the order of their tasks. `x` is `[tokens, hidden]`."""
        answers = is_decode(batch)
        host_attends = answers and self.schedule.host_attends
        rows = divided(self.sizes, batch)
        parts = [self._part(number, x, batch, own, not host_attends) for number, own in enumerate(rows)]
        order = self.schedule.order if answers else Layerwise(self.attends)
        self._begin(parts, order, host_attends)
        return parts, order

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """Wait for the micro-batches; return the hidden states of the step's tokens in order, `[tokens, hidden]`."""
        found = [part for part in parts if isinstance(part, QueuedMicroBatch)]
        return reassemble([part.rows for part in found], [part.arrive() for part in found])

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """Return all tokens as one micro-batch, to compute a single block."""
        part = self._part(0, x, batch, np.arange(len(x)), attended_there=True)
        self.on_start(False)
        if self.visiting is not None:
            self.visiting.begin([part.batch], [])
        return part

    @property
    def sizes(self) -> MicroBatchLimits:
        """The limits on the sizes of micro-batches."""
        schedule = self.schedule
        if self.pages:  # in a group, every micro-batch must fit on every node
            return MicroBatchLimits(schedule.micro_batch, schedule.min_parts, self.chunk, self.pages, limit_decode=True)
        room = 0 if self.visiting is None else self.visiting.capacity
        return MicroBatchLimits(
            schedule.micro_batch, schedule.min_parts, self.chunk, room, limit_decode=not schedule.host_attends
        )

    def _begin(self, parts: Sequence[QueuedMicroBatch], order: Order, host_attends: bool) -> None:
        found = visits(order, range(len(self.attends)), len(parts))
        set_visit_counts(found, self.holds)
        self.on_start(host_attends)
        if self.visiting is not None:
            attended = [
                (self.layers[visit.block], job.micro_batch)
                for visit in found
                if self.attends[visit.block]
                for job in visit.jobs
                if Phase.OUTPUT in job.phases
            ]
            self.visiting.begin([part.batch for part in parts], [] if host_attends else attended)

    def _part(self, number: int, x: F32, batch: Batch, rows: I64, attended_there: bool) -> QueuedMicroBatch:
        own = Batch(batch.positions[rows], batch.sequence[rows], batch.tables)
        return QueuedMicroBatch(number, x[rows], own, rows, self.lanes, attended_there)
