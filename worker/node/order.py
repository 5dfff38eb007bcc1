"""The order of a step as data: a sequence of tasks (micro-batch, block, phase), and its grouping into visits.

In an order, each micro-batch passes the blocks in sequence, and the phases of each block in sequence. `visits` groups
adjacent tasks of one block into a visit, so that the block's weights are held once. Adjacent phases of one micro-batch
become one call.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby


class Phase(IntEnum):
    """The phases of the computation of one micro-batch in one block, in sequence."""

    PREPARE = 0  # apply the norm, and round for quantised weights: once for all segments
    SELECT = 1  # choose the units to compute: all, some neurons, or some experts
    PROJECT = 2  # compute queries, keys and values
    ATTEND = 3  # append keys and values to the pages, and attend to the pages
    OUTPUT = 4  # compute the block's partial result
    SUM = 5  # sum over all nodes; the residual is added when the next task of the micro-batch needs it


COMPUTE = frozenset(Phase) - {Phase.SUM}


@dataclass(frozen=True)
class Task:
    """One phase of one micro-batch in one block."""

    micro_batch: int
    block: int
    phase: Phase


Order = Callable[[int, int], Iterable[Task]]
"""A function from the number of blocks and the number of micro-batches to the tasks of a step."""


@dataclass(frozen=True)
class Job:
    """Adjacent phases of one micro-batch in one block, run as one call."""

    micro_batch: int
    phases: frozenset[Phase]

    @property
    def sums(self) -> bool:
        """True if the job is the sum over all nodes."""
        return Phase.SUM in self.phases


@dataclass(frozen=True)
class Visit:
    """The jobs for one block while its weights are held, and the sums that are started afterwards."""

    block: int
    jobs: tuple[Job, ...]
    sums: tuple[Job, ...]


def block_by_block(blocks: int, micro_batches: int) -> Iterator[Task]:
    """Yield the tasks block by block, and within a block micro-batch by micro-batch.

    With two micro-batches, one computes while the sum of the other is on the network.
    """
    for block in range(blocks):
        for micro_batch in range(micro_batches):
            for phase in Phase:
                yield Task(micro_batch, block, phase)


@lru_cache(maxsize=64)
def visits(order: Order, blocks: range, micro_batches: int) -> tuple[Visit, ...]:
    """Return the tasks of `order`, grouped into visits of the blocks with the numbers `blocks`."""
    tasks = groupby(order(len(blocks), micro_batches), lambda task: task.block)
    return tuple(_visit(blocks[block], list(own)) for block, own in tasks)


def _visit(block: int, tasks: list[Task]) -> Visit:
    jobs = [
        Job(micro_batch, frozenset(task.phase for task in group))
        for (micro_batch, _), group in groupby(tasks, lambda task: (task.micro_batch, task.phase is Phase.SUM))
    ]
    held = max((at for at, job in enumerate(jobs, 1) if not job.sums), default=0)
    return Visit(block, tuple(jobs[:held]), tuple(jobs[held:]))
