"""A step of a batch in micro-batches: who is in which, in which order, and which pages visit the accelerator when."""

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
from worker.pipelines.dividing import Sizes, decodes, divided
from worker.pipelines.lanes import BatchLanes
from worker.pipelines.longhold import LongHold
from worker.pipelines.micro import LiftedMicroBatch
from worker.pipelines.orders import Interleaved, Layerwise
from worker.pipelines.visiting import VisitingPages

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


def schedule_of(attends: tuple[bool, ...], policy: BatchPolicy, group: GroupBatch | None = None) -> BatchSchedule:
    """The paper's: CGOPipe where the host attends, else its S4; `attends` says of each block if it is attention.

    In a `group` of several nodes the order is everybody's, whoever attends on this one.
    """
    here = not policy.attention_there
    ahead = here if group is None else group.host_attends
    least = min(HOST_OVERLAP if ahead else PAGES_OVERLAP, policy.micro_batches)
    behind = 0 if group is None else 1
    order = Interleaved(attends, behind=behind) if ahead else Layerwise(attends)
    return BatchSchedule(policy.micro_batch, here, order, least)


def put_back(rows: Sequence[I64], parts: Sequence[F32]) -> F32:
    """Hidden states of a step's tokens in their order, from those of its micro-batches."""
    out = np.empty((sum(map(len, rows)), parts[0].shape[1]), np.float32)
    for own, part in zip(rows, parts, strict=True):
        out[own] = part
    return out


def hold_for(found: Sequence[Visit], holds: Mapping[int, list[LongHold]]) -> None:
    """A step begins that makes these visits: what is held stays until the last of them."""
    counts = Counter(visit.block for visit in found if visit.jobs)
    for block, own in holds.items():
        for hold in own:
            hold.begin(counts[block])


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
        pages: of one micro-batch at most, on any node of a group; 0: as this node has room.
    """

    lanes: BatchLanes
    attends: tuple[bool, ...]
    layers: tuple[int, ...]  # of each block
    visiting: VisitingPages | None
    schedule: BatchSchedule
    chunk: int
    starts: Starts
    holds: Mapping[int, list[LongHold]] = field(default_factory=dict)
    pages: int = 0

    def divide(self, x: F32, batch: Batch) -> tuple[Sequence[MicroBatch], Order]:
        """See `Division.divide`."""
        answers = decodes(batch)
        here = answers and self.schedule.host_attends
        rows = divided(self.sizes, batch)
        parts = [self._part(number, x, batch, own, not here) for number, own in enumerate(rows)]
        order = self.schedule.order if answers else Layerwise(self.attends)
        self._begin(parts, order, here)
        return parts, order

    def joined(self, parts: Sequence[MicroBatch]) -> F32:
        """See `Division.joined`."""
        found = [part for part in parts if isinstance(part, LiftedMicroBatch)]
        return put_back([part.rows for part in found], [part.arrive() for part in found])

    def alone(self, x: F32, batch: Batch) -> MicroBatch:
        """See `Division.alone`."""
        part = self._part(0, x, batch, np.arange(len(x)), attended_there=True)
        self.starts(False)
        if self.visiting is not None:
            self.visiting.begin([part.batch], [])
        return part

    @property
    def sizes(self) -> Sizes:
        """What its micro-batches may be."""
        schedule = self.schedule
        if self.pages:  # of a group: what has room on one node has to be all that any node computes with
            return Sizes(schedule.micro_batch, schedule.least, self.chunk, self.pages, visits=True)
        room = 0 if self.visiting is None else self.visiting.capacity
        return Sizes(schedule.micro_batch, schedule.least, self.chunk, room, visits=not schedule.host_attends)

    def _begin(self, parts: Sequence[LiftedMicroBatch], order: Order, here: bool) -> None:
        found = visits(order, len(self.attends), len(parts))
        hold_for(found, self.holds)
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
        return LiftedMicroBatch(number, x[rows], own, rows, self.lanes, attended_there)
