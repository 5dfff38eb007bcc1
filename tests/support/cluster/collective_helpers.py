"""Groups of threads in one process, each node with sockets of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import numpy as np
import pytest

from allreduce.algorithms import shared
from allreduce.algorithms.loopback import Board
from allreduce.base import F32, Endpoints, Group, GroupSpec, Peer, open_group
from tpi.net.sockets import COLLECTIVE, Net

T = TypeVar("T")
SESSION = 0x1234_5678_9ABC_DEF0


def partials_of(size: int, count: int, seed: int = 0) -> list[F32]:
    """Return a partial `[1, count]` for each rank, with magnitudes that make the order of summation visible."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((1, count)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(size)]


class House:
    """A context and one bound socket per worker; joins nodes to groups and closes everything at the end."""

    def __init__(self, size: int, **spec: object) -> None:
        self.size = size
        self.net = Net()
        bound = [self.net.bind(COLLECTIVE, "127.0.0.1", 0) for _ in range(size - 1)]
        self.routers = [None, *(router for router, _ in bound)]
        self.memory = shared.BoardMemory(size) if shared.available() else None
        addresses = [self.memory.address if self.memory else "", *(f"tcp://127.0.0.1:{port}" for _, port in bound)]
        self.peers = tuple(Peer(rank, f"node{rank}", address) for rank, address in enumerate(addresses))
        self.fields: dict[str, object] = {"session": SESSION, "epoch": 1, "timeout_s": 10.0, **spec}
        self.board = Board(size)

    def spec(self, rank: int, **changes: object) -> GroupSpec:
        return GroupSpec(rank=rank, peers=self.peers, **{**self.fields, **changes})  # type: ignore[arg-type]

    def endpoints(self, rank: int, **changes: object) -> Endpoints:
        fields = {"net": self.net, "router": self.routers[rank], "board": self.board, **changes}
        return Endpoints(**fields)  # type: ignore[arg-type]

    def join(self, name: str, rank: int, **changes: object) -> Group:
        return open_group(name, self.spec(rank, **changes), self.endpoints(rank))

    def close(self) -> None:
        self.net.close()
        if self.memory:
            self.memory.__exit__(None, None, None)

    def __enter__(self) -> "House":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_group(name: str, size: int, node: Callable[[Group], T], **spec: object) -> list[T]:
    """Run `node` on each rank, in one thread per rank; return the results by rank."""

    if name == "shared" and not shared.available():
        pytest.skip("shared memory needs Linux and the native part")

    def serve(rank: int) -> T:
        group = house.join(name, rank)
        try:
            group.begin(1)
            result = node(group)
            with suppress(BrokenBarrierError):
                done.wait(30)
            return result
        except BaseException:
            done.abort()
            raise
        finally:
            group.close()

    done = Barrier(size)

    with House(size, **spec) as house, ThreadPoolExecutor(size) as pool:
        return list(pool.map(serve, range(size)))
