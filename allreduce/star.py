"""Star: workers send their partials to the master, which sums them in rank order and sends the sum to all.

Two one-way latencies, whatever the number of nodes; the master's link carries 2 (n - 1) payloads (TPI-LLM, 3.2).
Partials travel in the group's wire format, the sum goes back in f32, so that every node holds the same bits.
"""

from allreduce.base import F32
from allreduce.flight import Exchange
from allreduce.networked import Networked


class Star(Networked):
    """The default collective, and the reference that tests compare the others with."""

    name = "star"

    def reach(self) -> set[int]:
        """The master reaches all workers, a worker the master."""
        return set(self.others) if self.rank == 0 else {0}

    def _allreduce(self, values: F32) -> Exchange:
        number = self.transport.reserve(2)
        if self.rank:
            self.transport.send((0,), number, values, self._codec)
        yield
        total = self._buffer(values.size)
        if self.rank == 0:
            self._gather(values, number, total)
            self.transport.send(self.others, number + 1, total, self._exact)
        else:
            self.transport.receive(0, number + 1, total, self._exact)
        return total

    def _reduce(self, values: F32) -> Exchange:
        return self._reduce_to_master(values)
