"""The order of a step's tasks: if each micro-batch keeps its own order, the tokens are the same."""

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce.algorithms.loopback import Loopback
from tests.support.cluster.inprocess import in_process_engine
from tests.support.orders import phase_by_phase, use_order
from tpi.pack.reader import Pack
from worker.node.order import COMPUTE, Order, Phase, Task, block_by_block, visits


def two_blocks_behind(blocks: int, micro_batches: int) -> Iterator[Task]:
    """Return a pipeline in which micro-batch m is m blocks behind the first."""
    for diagonal in range(blocks + micro_batches - 1):
        for micro_batch in range(micro_batches):
            if 0 <= diagonal - micro_batch < blocks:
                yield from (Task(micro_batch, diagonal - micro_batch, phase) for phase in Phase)


PROMPT = [3 + 7 * at % 200 for at in range(90)]
ORDERS = [block_by_block, phase_by_phase, two_blocks_behind]


@given(st.sampled_from(ORDERS), st.integers(1, 6), st.integers(1, 4))
def test_visits_hold_every_task_once_and_in_order(order: Order, blocks: int, micro_batches: int) -> None:
    tasks = list(order(blocks, micro_batches))
    run = [
        (visit.block, job.micro_batch, phase)
        for visit in visits(order, range(blocks), micro_batches)
        for job in (*visit.jobs, *visit.sums)
        for phase in sorted(job.phases)
    ]
    assert sorted(run) == sorted((task.block, task.micro_batch, task.phase) for task in tasks)
    for micro_batch in range(micro_batches):
        own = [(block, phase) for block, each, phase in run if each == micro_batch]
        assert own == [(block, phase) for block in range(blocks) for phase in Phase]


def test_the_plain_order_fuses_the_phases_of_each_block() -> None:
    found = visits(block_by_block, range(3), 2)
    assert [visit.block for visit in found] == [0, 1, 2]
    for visit in found:
        assert [(job.micro_batch, job.phases) for job in visit.jobs] == [
            (0, COMPUTE), (0, frozenset({Phase.SUM})), (1, COMPUTE),
        ]  # fmt: skip
        assert [(job.micro_batch, job.sums) for job in visit.sums] == [(1, True)]


def test_phase_by_phase_keeps_phases_apart() -> None:
    (visit,) = visits(phase_by_phase, range(1), 2)
    phases = [phase for phase, _ in groupby(min(job.phases) for job in visit.jobs)]
    assert phases == sorted(COMPUTE)
    assert len(visit.sums) == 2


@pytest.mark.parametrize("order", [phase_by_phase, two_blocks_behind])
@pytest.mark.parametrize("shares", [[1], [1, 2]])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_do_not_depend_on_the_order(
    family: str,
    shares: list[float],
    order: Order,
    tiny_pack: Callable[..., Pack],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt in two micro-batches, whose sums overlap, gives the bits of the plain order."""
    monkeypatch.setattr(Loopback, "overlaps", True)
    pack = tiny_pack(family)
    with in_process_engine(pack, shares, tmp_path, chunk=128) as engine:
        expected = engine.logits(PROMPT)
    use_order(monkeypatch, order)
    with in_process_engine(pack, shares, tmp_path, chunk=128) as engine:
        np.testing.assert_array_equal(engine.logits(PROMPT), expected)
