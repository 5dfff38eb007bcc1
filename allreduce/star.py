"""Star: workers send their partials to the master, which sums them in rank order and sends the sum to all.

Two one-way latencies, whatever the number of nodes; the master's link carries 2 (n - 1) payloads (TPI-LLM, section 3.2).
Partials travel in the group's wire format, the sum goes back in f32, so that every node holds the same bits.
"""

from allreduce.base import F32, GroupSpec
from allreduce.networked import Networked


class Star(Networked):
    """The default collective, and the reference that tests compare the others with."""

    name = "star"

    @classmethod
    def reach(cls, spec: GroupSpec) -> set[int]:
        return set(range(1, spec.size)) if spec.rank == 0 else {0}

    def _allreduce(self, values: F32) -> F32:
        number = self.transport.reserve(2)
        if self.rank == 0:
            total = self._gather(values, number)
            self.transport.send(range(1, self.size), number + 1, total, self._exact)
        else:
            self.transport.send((0,), number, values, self._codec)
            total = self._buffer(values.size)
            self.transport.receive(0, number + 1, total, self._exact)
        return total

    def _reduce(self, values: F32) -> F32:
        number = self.transport.reserve(1)
        if self.rank == 0:
            return self._gather(values, number)
        self.transport.send((0,), number, values, self._codec)
        return values
