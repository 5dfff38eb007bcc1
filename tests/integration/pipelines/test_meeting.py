"""Nodes of a group meet in every sum, each of one micro-batch of one block, and no node waits for ever."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.devices.grouping import CASES, grouped
from tests.support.devices.offloading import answers, prompts
from tpi.kernels.spec import Batch
from tpi.pack.reader import Pack
from worker.node.block import Block
from worker.node.node import Node
from worker.node.order import Phase, visits
from worker.pipelines.micro import QueuedMicroBatch
from worker.pipelines.orders import Interleaved, Layerwise

IN_FLIGHT = 2
Event = tuple[str, Any]
"""A sum is started, of something; or the oldest one is finished, and waited for."""


@pytest.mark.parametrize("case", CASES)
def test_all_nodes_have_the_same_sums_in_the_same_order(
    case: str, tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tiny_pack("mixtral")
    with grouped(pack, tmp_path, CASES[case]) as (deployment, nodes):
        logs = [_logged(node, monkeypatch) for node in nodes]
        answers(deployment, prompts(pack.config.vocab, 9, seed=5), 3)
    assert len(logs[0]) > 50
    assert all(log == logs[0] for log in logs)
    for seed in range(20):
        assert meet(logs, Random(seed))


def _logged(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    log: list[Event] = []
    loop, start, finish = node.loop, node.loop._start_sum, node.loop.group.finish

    def started(block: Block, part: Any) -> None:
        log.append(("start", (block.number, tuple(part.rows.tolist()))))
        start(block, part)

    def finished() -> Any:
        log.append(("finish", None))
        return finish()

    monkeypatch.setattr(loop, "_start_sum", started)
    monkeypatch.setattr(loop.group, "finish", finished)
    return log


def meet(logs: Sequence[Sequence[Event]], random: Random) -> bool:
    """Return True if all nodes end, in any interleaving; a sum is finished when all nodes have started it."""
    at = [0] * len(logs)
    started: list[list[Any]] = [[] for _ in logs]
    done = [0] * len(logs)
    while open_ones := [rank for rank, log in enumerate(logs) if at[rank] < len(log)]:
        able = [rank for rank in open_ones if _able(logs[rank][at[rank]], rank, started, done)]
        if not able:
            return False
        rank = random.choice(able)
        kind, what = logs[rank][at[rank]]
        at[rank] += 1
        if kind == "start":
            started[rank].append(what)
            if any(len(other) >= len(started[rank]) and other[len(started[rank]) - 1] != what for other in started):
                return False
        else:
            done[rank] += 1
    return True


def _able(event: Event, rank: int, started: list[list[Any]], done: list[int]) -> bool:
    if event[0] == "start":
        return len(started[rank]) - done[rank] < IN_FLIGHT
    return all(len(other) > done[rank] for other in started)


def sums_of(order: Interleaved | Layerwise, blocks: int, parts: int) -> list[Event]:
    """Return the sums of an order as the block loop starts and finishes them: a micro-batch goes on after its sum."""
    log: list[Event] = []
    flying: list[int] = []

    def finish_for(part: int) -> None:
        while part in flying:
            flying.pop(0)
            log.append(("finish", None))

    for visit in visits(order, range(blocks), parts):
        for job in (*visit.jobs, *visit.sums):
            if Phase.SUM not in job.phases:
                finish_for(job.micro_batch)
                continue
            if len(flying) == IN_FLIGHT:
                finish_for(flying[0])
            flying.append(job.micro_batch)
            log.append(("start", (visit.block, job.micro_batch)))
    log += [("finish", None)] * len(flying)
    return log


halves = st.lists(st.booleans(), min_size=1, max_size=6).map(lambda rest: (True, *rest))


@given(halves, st.integers(1, 7), st.integers(0, 3), st.integers(0, 1), st.integers(1, 4), st.randoms())
def test_an_order_meets_on_any_number_of_nodes_and_interleaving(
    attends: tuple[bool, ...], parts: int, ahead: int, behind: int, nodes: int, random: Random
) -> None:
    order = Interleaved(attends, ahead, behind) if ahead else Layerwise(attends)
    log = sums_of(order, len(attends), parts)
    assert len([kind for kind, _ in log if kind == "start"]) == parts * len(attends)
    assert meet([log] * nodes, random)


def test_nodes_that_divide_otherwise_do_not_meet() -> None:
    attends = (True, False, True, False)
    one, other = (sums_of(Interleaved(attends, behind=1), len(attends), parts) for parts in (5, 6))
    assert not meet([one, other], Random(0))
    assert not meet([one, sums_of(Interleaved(attends), len(attends), 5)], Random(0))


def test_what_failed_on_a_worker_is_said_with_its_next_sum(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """No node gets hidden states at the end of a step, so no later message would report the failure."""
    with grouped(tiny_pack("llama"), tmp_path, CASES["two alike"]) as (_, (node, _)):
        one = np.zeros((1, node.loop.group.spec.payload_values[0]), np.float32)
        nothing = np.zeros(1, np.int32)
        part = node.loop._division.alone(one, Batch(nothing, nothing, nothing[None]))
        assert isinstance(part, QueuedMicroBatch)
        part._moves.append(part._lanes.device.start(_broken))
        with pytest.raises(ZeroDivisionError):
            part.partial()


def _broken() -> None:
    raise ZeroDivisionError
