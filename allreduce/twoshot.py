"""Two-shot: a direct reduce-scatter (member r sums chunk r of all), then a direct all-gather of the chunk sums.

Two one-way latencies as a star, but every link carries only 2 (n - 1) / n payloads each way: the least of all
algorithms, for large payloads. In f32 the bits are those of a star. In a quantised wire format the chunk sums are
encoded once more to travel back, and every member, the one that summed the chunk included, uses what it decodes to.
"""

import numpy as np

from allreduce.base import F32
from allreduce.chunks import chunks
from allreduce.networked import Networked

_DIRECT_VALUES = 1 << 14  # a reduce of fewer goes straight to the master: one latency instead of two


class TwoShot(Networked):
    """The collective of least traffic per link."""

    name = "two-shot"

    def reach(self) -> set[int]:
        """Everyone reaches everyone."""
        return set(self.others)

    def _allreduce(self, values: F32) -> F32:
        number = self.transport.reserve(2)
        total, parts = self._buffer(values.size), chunks(values.size, self.size)
        mine = total[parts[self.rank]]
        self._scatter(values, number, mine)
        if mine.size:
            self.transport.send(self.others, number + 1, mine, self._codec)
            np.copyto(mine, self._as_received(mine))
        self._collect(number + 1, total)
        return total

    def _reduce(self, values: F32) -> F32:
        if values.size < _DIRECT_VALUES:
            return self._reduce_to_master(values)
        number = self.transport.reserve(2)
        total, parts = self._buffer(values.size), chunks(values.size, self.size)
        mine = total[parts[self.rank]]
        self._scatter(values, number, mine)
        if self.rank == 0:
            self._collect(number + 1, total)
        elif mine.size:
            self.transport.send((0,), number + 1, mine, self._codec)
        return total

    def _scatter(self, values: F32, number: int, mine: F32) -> None:
        """Send each member its chunk of `values`, and write to `mine` the sum of everyone's chunk for this member."""
        parts = chunks(values.size, self.size)
        for rank in self.others:
            if values[parts[rank]].size:
                self.transport.send((rank,), number, values[parts[rank]], self._codec)
        if mine.size:
            self._gather(values[parts[self.rank]], number, mine)

    def _collect(self, number: int, total: F32) -> None:
        """Receive the chunks of `total` that the others summed."""
        parts = chunks(total.size, self.size)
        for rank in self.others:
            if total[parts[rank]].size:
                self.transport.receive(rank, number, total[parts[rank]], self._codec)
