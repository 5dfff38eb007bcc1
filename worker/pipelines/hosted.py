"""The pipeline of a node without an accelerator, whose group computes a batch in micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.model.roofline.policy import BatchPolicy
from tpi.kernels.spec import Batch
from tpi.net.fields import GroupBatch
from worker.node.microbatch import MicroBatch
from worker.node.order import Order
from worker.node_plan import NodePlan
from worker.pipelines.dividing import MicroBatchLimits, divided, is_decode
from worker.pipelines.orders import Layerwise
from worker.pipelines.pipeline import BatchSchedule, reassemble, schedule_of
from worker.plan.modes.batch import buffer_pages

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class HostedMicroBatch(MicroBatch):
    """A micro-batch that knows `rows`, the indices of its tokens in the step."""

    def __init__(self, x: F32, batch: Batch, rows: I64) -> None:
        super().__init__(x, batch)
        self.rows = rows


@dataclass(frozen=True)
class HostedPipeline:
    """A division of steps into the same micro-batches, in the same order, as on nodes with an accelerator.

    Attributes:
        attends: whether each block is attention.
        schedule: used for decode steps.
        sizes: the limits on the sizes of micro-batches.
    """

    attends: tuple[bool, ...]
    schedule: BatchSchedule
    sizes: MicroBatchLimits

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """Return the micro-batches of a step and the order of their tasks. `x` is `[tokens, hidden]`."""
        rows = divided(self.sizes, batch)
        parts = [
            HostedMicroBatch(x[own], Batch(batch.positions[own], batch.sequence[own], batch.tables), own)
            for own in rows
        ]
        return parts, self.schedule.order if is_decode(batch) else Layerwise(self.attends)

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """Return the hidden states of the step's tokens in order, `[tokens, hidden]`."""
        found = [part for part in parts if isinstance(part, HostedMicroBatch)]
        return reassemble([part.rows for part in found], [part.x for part in found])

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """Return all tokens as one micro-batch, to compute a single block."""
        return HostedMicroBatch(x, batch, np.arange(len(x)))


def hosted_pipeline(plan: NodePlan, agreed: GroupBatch) -> HostedPipeline:
    """Return the pipeline of a node without an accelerator, for the batch settings on which its group has agreed."""
    attends = tuple(block.kind == "attention" for block in plan.blocks)
    micro_batch = -(-agreed.batch // agreed.micro_batches)
    policy = BatchPolicy(agreed.batch, agreed.micro_batches)
    schedule = schedule_of(attends, policy, agreed)
    sizes = MicroBatchLimits(
        micro_batch, schedule.min_parts, agreed.chunk, buffer_pages(plan, micro_batch), limit_decode=True
    )
    return HostedPipeline(attends, schedule, sizes)
