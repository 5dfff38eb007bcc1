"""A step's order as data: whatever order keeps each micro-batch's own, the tokens are the same."""

from collections.abc import Iterator
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from worker.node.order import COMPUTE, Order, Phase, Task, phase_by_phase, plain, visits


def two_blocks_behind(blocks: int, micro_batches: int) -> Iterator[Task]:
    """A pipeline: micro-batch m is m blocks behind the first."""
    for diagonal in range(blocks + micro_batches - 1):
        for micro_batch in range(micro_batches):
            if 0 <= diagonal - micro_batch < blocks:
                yield from (Task(micro_batch, diagonal - micro_batch, phase) for phase in Phase)


ORDERS = [plain, phase_by_phase, two_blocks_behind]


@given(st.sampled_from(ORDERS), st.integers(1, 6), st.integers(1, 4))
def test_visits_hold_every_task_once_and_in_order(order: Order, blocks: int, micro_batches: int) -> None:
    tasks = list(order(blocks, micro_batches))
    run = [
        (visit.block, job.micro_batch, phase)
        for visit in visits(order, blocks, micro_batches)
        for job in (*visit.jobs, *visit.sums)
        for phase in sorted(job.phases)
    ]
    assert sorted(run) == sorted((task.block, task.micro_batch, task.phase) for task in tasks)
    for micro_batch in range(micro_batches):
        own = [(block, phase) for block, each, phase in run if each == micro_batch]
        assert own == [(block, phase) for block in range(blocks) for phase in Phase]


def test_the_plain_order_visits_each_block_once_and_fuses_its_phases() -> None:
    found = visits(plain, 3, 2)
    assert [visit.block for visit in found] == [0, 1, 2]
    for visit in found:
        assert [(job.micro_batch, job.phases) for job in visit.jobs] == [
            (0, COMPUTE), (0, frozenset({Phase.SUM})), (1, COMPUTE),
        ]  # fmt: skip
        assert [(job.micro_batch, job.sums) for job in visit.sums] == [(1, True)]


def test_phase_by_phase_keeps_phases_apart() -> None:
    (visit,) = visits(phase_by_phase, 1, 2)
    phases = [phase for phase, _ in groupby(min(job.phases) for job in visit.jobs)]
    assert phases == sorted(COMPUTE)
    assert len(visit.sums) == 2
