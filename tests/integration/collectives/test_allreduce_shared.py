"""The collective in shared memory: nodes that are late, dead or foreign, and what they leave behind."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from allreduce.algorithms import shared
from allreduce.algorithms.shared import BoardMemory
from allreduce.base import Endpoints, GroupSpec, Peer, open_group
from tests.support.cluster.collective_helpers import SESSION, partials_of
from tpi.errors import NodeLost, PlanError, UsageError

pytestmark = pytest.mark.skipif(not shared.available(), reason="shared memory needs Linux and the native part")
PARTIALS = partials_of(3, 1000)


def spec(rank: int, address: str, size: int = 3, **fields: object) -> GroupSpec:
    peers = (Peer(0, "master", address), *(Peer(other, f"node{other}", "") for other in range(1, size)))
    return GroupSpec(rank, SESSION, 1, peers, **fields)  # type: ignore[arg-type]


def serve(rank: int, address: str, rounds: int, pipe: Connection) -> None:
    """Run a node in a process of its own, which sends back the bytes of its last sum."""
    pipe.send_bytes(sum_growing(rank, address, rounds))


def sum_growing(rank: int, address: str, rounds: int) -> bytes:
    """Sum `rounds` times, with payloads that outgrow one place on the board; return the bytes of the last sum."""
    group = open_group("shared", spec(rank, address, spin_us=50 * (rank % 2)), Endpoints())
    for step in range(rounds):
        group.begin(step)
        partial = np.full((1, 3 + step * 1000), np.float32(1 + rank + step))
        total = group.allreduce(partial)
    last = total.tobytes()
    group.close()
    return last


def test_processes_sum() -> None:
    """Child processes open the board of their parent, as workers do."""
    context = multiprocessing.get_context("spawn")
    rounds = 150  # up to 149,003 values: three turns
    pipes, children = [], []
    with BoardMemory(3) as memory:
        for rank in (1, 2):
            here, there = context.Pipe()
            pipes.append(here)
            children.append(context.Process(target=serve, args=(rank, memory.address, rounds, there)))
            children[-1].start()
        sums = [sum_growing(0, memory.address, rounds), *(pipe.recv_bytes() for pipe in pipes)]
        for child in children:
            child.join(20)
            assert child.exitcode == 0
    assert sums[0] == sums[1] == sums[2]
    np.testing.assert_array_equal(np.frombuffer(sums[0], np.float32), 3 * rounds + 3)


def test_a_member_that_does_not_come_is_named() -> None:
    with BoardMemory(3) as memory, ThreadPoolExecutor(2) as pool:

        def lose(rank: int) -> str:
            group = open_group("shared", spec(rank, memory.address, timeout_s=3), Endpoints())
            with pytest.raises(NodeLost, match=r"node2 \(rank 2\) did not answer for 3 s") as lost:
                group.allreduce(PARTIALS[rank])
            group.close()
            return lost.value.node

        assert list(pool.map(lose, (0, 1))) == ["node2", "node2"]


def test_a_progressing_node_is_waited_for() -> None:
    looked = Event()

    def watch(rank: int) -> bool:
        assert rank == 1
        looked.set()
        return True

    with BoardMemory(2) as memory, ThreadPoolExecutor(1) as pool:

        def late() -> None:
            group = open_group("shared", spec(1, memory.address, 2), Endpoints())
            assert looked.wait(20)
            group.allreduce(PARTIALS[1])
            group.close()

        task = pool.submit(late)
        group = open_group("shared", spec(0, memory.address, 2, timeout_s=0.05), Endpoints(watch=watch))
        total = group.allreduce(PARTIALS[0])
        task.result(20)
        np.testing.assert_array_equal(total, PARTIALS[0] + PARTIALS[1])
        assert (group.stats.exchanges, group.stats.sent_bytes, group.stats.received_bytes) == (1, 4000, 4000)
        group.close()


def test_only_the_memory_of_a_group_is_opened(tmp_path: Path) -> None:
    """The master gives the address of the memory. It must not be able to make a worker write to a file."""
    secret = tmp_path / "tpi-allreduce"  # the right name does not help
    secret.write_bytes(bytes(1 << 20))
    with secret.open("r+b") as file:
        for address in (
            f"memory:{os.getpid()}:{file.fileno()}",
            "memory:1:0",
            "memory:x:y",
            f"memory:{os.getpid()}:999",
        ):
            with pytest.raises(PlanError, match="memory"):
                open_group("shared", spec(0, address), Endpoints())
    assert secret.read_bytes() == bytes(1 << 20)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values: values.astype(np.float64),
        lambda values: np.repeat(values, 2)[::2],
        lambda values: values.reshape(2, -1),
        lambda values: values.astype(values.dtype.newbyteorder(">")),
        lambda values: values.tolist(),
    ],
)
def test_the_board_converts_no_array(wrong: Callable[[Any], Any]) -> None:
    """If the board converted the caller's array, it would write the sum to a copy, and the sum would be lost."""
    from allreduce._shared import Board

    values = np.arange(8, dtype=np.float32)
    memory = np.zeros(Board.bytes(1, 8) + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: Board.bytes(1, 8)]
    board = Board(memory, 0, 1, 8)
    with pytest.raises(TypeError):
        board.lay(wrong(values))
    board.lay(values)
    with pytest.raises(TypeError):
        board.take(wrong(values), 0.0, 0.1)
    total = np.zeros_like(values)
    assert board.take(total, 0.0, 0.1) == -1
    np.testing.assert_array_equal(total, values)
    read_only = np.zeros_like(values)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        board.take(read_only, 0.0, 0.1)
    with pytest.raises(TypeError):
        Board(np.repeat(memory, 2)[::2], 0, 1, 8)


def test_it_is_for_one_machine() -> None:
    with pytest.raises(UsageError, match="--local"):
        open_group("shared", spec(0, ""), Endpoints())


def test_nothing_is_left() -> None:
    gc.collect()  # what other tests left to be found
    files = len(list(Path("/proc/self/fd").iterdir()))
    with BoardMemory(2) as memory:
        group = open_group("shared", spec(0, memory.address, 2), Endpoints())
        group.close()
        del group
    assert "tpi-allreduce" not in Path("/proc/self/maps").read_text()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files  # threads of other tests may end meanwhile
