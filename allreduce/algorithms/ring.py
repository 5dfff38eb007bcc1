"""Ring: chunks travel round the ring of ranks, once to be summed and once more to be shared.

It takes 2 (n - 1) one-way latencies and 2 (n - 1) / n payloads on every link each way (Patarasuk and Yuan, 2009). A
node communicates with only two others. Over links with latency it is the slowest (TPI-LLM, A.1). Partial sums travel in
the group's wire format, the chunk sums in f32. All nodes hold the same sum, but it is not added in rank order.
"""

import numpy as np

from allreduce.base import F32
from allreduce.chunks import chunks
from allreduce.flight import Exchange
from allreduce.networked import Networked
from tpi.net.wire import EXACT


class RingGroup(Networked):
    """A group in which rank r sends to rank r + 1 and receives from rank r - 1."""

    name = "ring"

    @property
    def overlaps(self) -> bool:
        """False: a node must receive a chunk before it can pass the chunk on, so no sum advances in the background."""
        return False

    def partners(self) -> set[int]:
        """Return the ranks of both neighbours, and of the master, to which the last sum of a step is sent directly."""
        if self.rank == 0:
            return set(self.others)
        return {self._next, self._previous, 0}

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def _previous(self) -> int:
        return (self.rank - 1) % self.size

    def _allreduce(self, values: F32) -> Exchange:
        values = values.reshape(-1)
        rounds = self.size - 1
        number = self.box.reserve(2 * rounds)
        total = yield from self._reduce_scatter(values, number)
        parts = chunks(values.size, self.size)
        for turn in range(rounds):
            outgoing = total[parts[(self.rank + 1 - turn) % self.size]]
            incoming = total[parts[(self.rank - turn) % self.size]]
            if outgoing.size:
                self.box.send((self._next,), number + rounds + turn, outgoing, EXACT.code)
            if incoming.size:
                self.box.receive(self._previous, number + rounds + turn, incoming, EXACT.code)
        return total

    def _reduce(self, values: F32) -> Exchange:
        values = values.reshape(-1)
        rounds = self.size - 1
        number = self.box.reserve(rounds + 1)
        total = yield from self._reduce_scatter(values, number)
        parts = chunks(values.size, self.size)
        mine = total[parts[self._next]]
        if self.rank and mine.size:
            self.box.send((0,), number + rounds, mine, EXACT.code)
        for rank in self.others if self.rank == 0 else ():
            theirs = total[parts[(rank + 1) % self.size]]
            if theirs.size:
                self.box.receive(rank, number + rounds, theirs, EXACT.code)
        return total

    def _reduce_scatter(self, values: F32, number: int) -> Exchange:
        """Run n - 1 rounds, after which rank r has the sum over all nodes of chunk r + 1."""
        parts = chunks(values.size, self.size)
        outgoing = values[parts[self.rank]]
        if outgoing.size:
            self.box.send((self._next,), number, outgoing, self.code)
        yield
        total = self._buffer(values)
        np.copyto(total, values)
        for turn in range(self.size - 1):
            outgoing = total[parts[(self.rank - turn) % self.size]]
            incoming = total[parts[(self.rank - turn - 1) % self.size]]
            if turn and outgoing.size:
                self.box.send((self._next,), number + turn, outgoing, self.code)
            if incoming.size:
                self.box.add(self._previous, number + turn, incoming, self.code)
        return total
