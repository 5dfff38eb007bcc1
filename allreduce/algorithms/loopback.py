"""Loopback: the in-process collective, for one node alone, or several threads of one process that share a `Board`."""

from threading import Condition
from time import monotonic

import numpy as np

from allreduce.base import F32, Endpoints, Group, GroupSpec
from allreduce.flight import Exchange
from tpi.errors import NodeLost, PlanError


class Board:
    """The memory in which the nodes of one process exchange partial results.

    Each node gets the same board as `Endpoints.board`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = Condition()
        self._partials: dict[tuple[int, int], dict[int, F32]] = {}  # by step and exchange, then by rank
        self._finished: dict[tuple[int, int], int] = {}

    def put(self, rank: int, key: tuple[int, int], values: F32) -> None:
        """Store a copy of `values`, the partial result of node `rank`. `key` is the step and the number of the sum."""
        with self._changed:
            self._partials.setdefault(key, {})[rank] = values.copy()
            self._changed.notify_all()

    def collect(self, spec: GroupSpec, key: tuple[int, int]) -> list[F32]:
        """Return the partial results of all nodes for the sum `key`, in rank order.

        Raises:
            NodeLost: if a node has put no partial result after `spec.timeout_s` seconds.
        """
        deadline = monotonic() + spec.timeout_s
        with self._changed:
            partials = self._partials[key]
            while len(partials) < self.size:
                if not self._changed.wait(deadline - monotonic()):
                    peer = next(peer for peer in spec.peers if peer.rank not in partials)
                    raise NodeLost(peer.name, f"{peer.name} (rank {peer.rank}) took no part in a sum")
            return [partials[rank] for rank in range(self.size)]

    def finish(self, key: tuple[int, int]) -> None:
        """Record that one more node has computed the sum `key`.

        After the last node, its partial results are deleted.
        """
        with self._changed:
            self._finished[key] = self._finished.get(key, 0) + 1
            if self._finished[key] == self.size:
                del self._finished[key], self._partials[key]


class Loopback(Group):
    """The group of a single node, or of threads of one process. It sums in rank order, in f32."""

    name = "loopback"

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        super().__init__(spec)
        if spec.size > 1 and (endpoints.board is None or endpoints.board.size != spec.size):
            raise PlanError("collective 'loopback' is for a single node; choose another --collective, such as star")
        self.wire = "f32"
        self._board = endpoints.board
        self._key = (0, 0)

    @property
    def trivial(self) -> bool:
        """True for a single node. Its partial result is already the sum."""
        return self.size == 1

    def _begin(self, step: int) -> None:
        self._key = (step, 0)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _allreduce(self, values: F32) -> Exchange:
        yield
        if self.size == 1 or self._board is None:
            return values
        self._board.put(self.rank, self._key, values)
        partials = self._board.collect(self.spec, self._key)
        total: F32 = partials[0].copy()
        for partial in partials[1:]:
            np.add(total, partial, out=total)
        self._board.finish(self._key)
        self._key = (self._key[0], self._key[1] + 1)
        return total

    def _reduce(self, values: F32) -> Exchange:
        return self._allreduce(values)
