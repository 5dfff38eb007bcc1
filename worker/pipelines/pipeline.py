"""A step of a batch in micro-batches: who is in which, in which order, and which pages visit the accelerator when."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.model.roofline.latency import HOST_OVERLAP, PAGES_OVERLAP
from scheduler.model.roofline.policy import BatchPolicy
from tpi.devices.base import Device
from tpi.kernels.spec import Batch
from worker.node.microbatch import MicroBatch
from worker.node.order import Order, Phase, visits
from worker.pipelines.longhold import LongHold
from worker.pipelines.micro import LiftedMicroBatch
from worker.pipelines.orders import Interleaved, Layerwise
from worker.pipelines.visiting import VisitingPages, page_numbers

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Starts = Callable[[bool], None]
"""Called as a step begins, with whether the host attends: what it then reads must be at home."""


@dataclass(frozen=True)
class BatchSchedule:
    """How steps with one token of each sequence are done.

    Attributes:
        micro_batch: sequences of a micro-batch.
        host_attends: whether the host attends; else the accelerator does, with pages that visit it.
        order: of their tasks.
        least: micro-batches where there are fewer sequences, so that what can overlap does.
    """

    micro_batch: int
    host_attends: bool
    order: Order
    least: int = 1


def schedule_of(attends: tuple[bool, ...], policy: BatchPolicy) -> BatchSchedule:
    """The paper's: CGOPipe where the host attends, else its S4; `attends` says of each block if it is attention."""
    if policy.attention_there:
        return BatchSchedule(policy.micro_batch, False, Layerwise(attends), min(PAGES_OVERLAP, policy.micro_batches))
    return BatchSchedule(policy.micro_batch, True, Interleaved(attends), min(HOST_OVERLAP, policy.micro_batches))


@dataclass
class BatchPipeline:
    """See `worker.node.division.Division`.

    Prompts are attended with on the accelerator, layer by layer for all micro-batches (section 4): with more than one
    token of any sequence a step is a prompt's.

    Attributes:
        schedule: may be replaced between two steps.
        chunk: tokens of a prompt's micro-batch at most.
        starts: see `Starts`.
        holds: of each block's pieces that pass through.
    """

    device: Device
    attends: tuple[bool, ...]
    layers: tuple[int, ...]  # of each block
    visiting: VisitingPages | None
    schedule: BatchSchedule
    chunk: int
    starts: Starts
    holds: Mapping[int, list[LongHold]] = field(default_factory=dict)

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """See `Division.divide`."""
        decodes = len(np.unique(batch.sequence)) == len(x)
        here = decodes and self.schedule.host_attends
        rows = self._answers(batch) if decodes else list(self._prompts(batch))
        parts = [self._part(number, x, batch, own, not here) for number, own in enumerate(rows)]
        order = self.schedule.order if decodes else Layerwise(self.attends)
        self._begin(parts, order, here)
        return parts, order

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """See `Division.joined`."""
        out = np.empty((sum(len(part.batch.positions) for part in parts), parts[0].x.shape[1]), np.float32)
        for part in parts:
            assert isinstance(part, LiftedMicroBatch)
            out[part.rows] = part.arrive()
        return out

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """See `Division.alone`."""
        part = self._part(0, x, batch, np.arange(len(x)), attended_there=True)
        self.starts(False)
        if self.visiting is not None:
            self.visiting.begin([part.batch], [])
        return part

    def _begin(self, parts: Sequence[LiftedMicroBatch], order: Order, here: bool) -> None:
        found = visits(order, len(self.attends), len(parts))
        counts = Counter(visit.block for visit in found if visit.jobs)
        for block, holds in self.holds.items():
            for hold in holds:
                hold.begin(counts[block])
        self.starts(here)
        if self.visiting is not None:
            attended = [
                (self.layers[visit.block], job.micro_batch)
                for visit in found
                if self.attends[visit.block]
                for job in visit.jobs
                if Phase.OUTPUT in job.phases
            ]
            self.visiting.begin([part.batch for part in parts], [] if here else attended)

    def _part(self, number: int, x: F32, batch: Batch, rows: I64, attended_there: bool) -> LiftedMicroBatch:
        own = Batch(batch.positions[rows], batch.sequence[rows], batch.tables)
        return LiftedMicroBatch(number, x[rows], own, rows, self.device, attended_there)

    def _answers(self, batch: Batch) -> list[I64]:
        """Tokens of one sequence each: micro-batches of even numbers of sequences, and of about as much to attend to.

        Algorithm 2: the longest first, each to whichever has the least so far and is not full.
        """
        tokens = len(batch.positions)
        count = max(-(-tokens // self.schedule.micro_batch), min(tokens, self.schedule.least))
        count = max(count, self._least_parts(batch))
        found: list[list[int]] = [[] for _ in range(count)]
        filled, most = [0] * count, -(-tokens // count)
        for row in np.argsort(-batch.positions, kind="stable").tolist():
            at = min((at for at in range(count) if len(found[at]) < most), key=lambda at: filled[at])
            found[at].append(row)
            filled[at] += int(batch.positions[row]) + 1
        return [np.sort(np.array(rows, np.int64)) for rows in found if rows]

    def _least_parts(self, batch: Batch) -> int:
        """Micro-batches that are needed for each one's pages to have room on the accelerator."""
        if self.schedule.host_attends or self.visiting is None:
            return 1
        each = max(1, self.visiting.capacity // max(1, len(batch.tables[0])))
        return -(-len(batch.positions) // each)

    def _prompts(self, batch: Batch) -> Iterator[I64]:
        """Tokens in order, as many together as a chunk has and as there are pages for."""
        begin = 0
        while begin < len(batch.positions):
            end = min(begin + self.chunk, len(batch.positions))
            while end - begin > 1 and not self._has_room(batch.cut(slice(begin, end))):
                end = begin + (end - begin) // 2
            yield np.arange(begin, end)
            begin = end

    def _has_room(self, batch: Batch) -> bool:
        return self.visiting is None or len(page_numbers(batch).home) <= self.visiting.capacity
