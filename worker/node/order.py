"""A step's order as data: tasks of (micro-batch, block, phase), and how neighbours are run as one.

An order is any sequence of tasks in which each micro-batch passes the blocks in turn and each block's phases in turn.
The block loop runs what `visits` makes of it: one visit to a block for all tasks that follow one another there, so that
its weights are held once; phases that follow one another for one micro-batch are one call.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby


class Phase(IntEnum):
    """What is done with one micro-batch in one block, in this order."""

    PREPARE = 0  # norm, and rounding for quantised weights: once for all segments
    SELECT = 1  # which units are wanted: all, some neurons, some experts
    PROJECT = 2  # queries, keys and values; these are appended to the pages
    ATTEND = 3  # queries over the pages
    OUTPUT = 4  # the block's partial result
    SUM = 5  # over all nodes; the residual is added when the next task of the micro-batch needs it


COMPUTE = frozenset(Phase) - {Phase.SUM}


@dataclass(frozen=True)
class Task:
    """One phase of one micro-batch in one block."""

    micro_batch: int
    block: int
    phase: Phase


Order = Callable[[int, int], Iterable[Task]]
"""Called with the number of blocks and of micro-batches; the tasks of a step."""


@dataclass(frozen=True)
class Job:
    """Phases of one micro-batch that are run as one."""

    micro_batch: int
    phases: frozenset[Phase]

    @property
    def sums(self) -> bool:
        """Whether this is the sum, which is done by all nodes together."""
        return Phase.SUM in self.phases


@dataclass(frozen=True)
class Visit:
    """What is done at a block while its weights are held, and the sums that are started after that."""

    block: int
    jobs: tuple[Job, ...]
    sums: tuple[Job, ...]


def plain(blocks: int, micro_batches: int) -> Iterator[Task]:
    """Block by block, micro-batch by micro-batch.

    With two micro-batches these are the lanes of a prompt: while the sum of one travels, the other computes.
    """
    for block in range(blocks):
        for micro_batch in range(micro_batches):
            for phase in Phase:
                yield Task(micro_batch, block, phase)


def phase_by_phase(blocks: int, micro_batches: int) -> Iterator[Task]:
    """Every phase of a block for all micro-batches before the next: attention may then run elsewhere than products."""
    for block in range(blocks):
        for phase in Phase:
            for micro_batch in range(micro_batches):
                yield Task(micro_batch, block, phase)


@lru_cache(maxsize=64)
def visits(order: Order, blocks: int, micro_batches: int) -> tuple[Visit, ...]:
    """The order's tasks as the block loop runs them."""
    return tuple(
        _visit(block, list(tasks)) for block, tasks in groupby(order(blocks, micro_batches), lambda t: t.block)
    )


def _visit(block: int, tasks: list[Task]) -> Visit:
    jobs = [
        Job(micro_batch, frozenset(task.phase for task in group))
        for (micro_batch, _), group in groupby(tasks, lambda task: (task.micro_batch, task.phase is Phase.SUM))
    ]
    held = max((at for at, job in enumerate(jobs, 1) if not job.sums), default=0)
    return Visit(block, tuple(jobs[:held]), tuple(jobs[held:]))
