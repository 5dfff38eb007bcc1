"""Star: workers send their partial results to the master, which sums them in rank order and sends the sum to all.

It takes two one-way latencies for any number of nodes; the master's link carries 2 (n - 1) payloads (TPI-LLM, 3.2).
Partial results travel in the group's wire format. The sum goes back in f32, so that every node holds the same bits.
"""

from allreduce.base import F32
from allreduce.flight import Exchange
from allreduce.networked import Networked
from tpi.net.wire import EXACT


class Star(Networked):
    """A group in which the master sums all partial results. Tests compare the other algorithms with it."""

    name = "star"

    def partners(self) -> set[int]:
        """Return all workers on the master, and the master on a worker."""
        return set(self.others) if self.rank == 0 else {0}

    def _allreduce(self, values: F32) -> Exchange:
        box, number = self.box, self.box.reserve(2)
        if self.rank:
            box.send((0,), number, values, self.code)
        yield
        total = self._buffer(values)
        if self.rank == 0:
            box.sum(number, values, total, self.code)
            box.send(self.others, number + 1, total, EXACT.code)
        else:
            box.receive(0, number + 1, total, EXACT.code)
        return total

    def _reduce(self, values: F32) -> Exchange:
        return self._reduce_to_master(values)
