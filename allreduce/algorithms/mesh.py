"""Mesh (one-shot): every node sends its partial result to every other, and each sums all of them in rank order.

It takes one one-way latency, half of a star's; every link carries n - 1 payloads each way. All nodes add the same
decoded numbers in the same order, their own included. So they hold the same bits in every wire format.
"""

from allreduce.base import F32
from allreduce.flight import Exchange
from allreduce.networked import Networked


class Mesh(Networked):
    """A group in which every node sends to every other: the lowest latency for small payloads."""

    name = "mesh"

    def partners(self) -> set[int]:
        """Return all other ranks: in a mesh, every node exchanges messages with every other."""
        return set(self.others)

    def _allreduce(self, values: F32) -> Exchange:
        number = self.box.reserve(1)
        self.box.send(self.others, number, values, self.code)
        yield
        total = self._buffer(values)
        self.box.sum(number, values, total, self.code)
        return total

    def _reduce(self, values: F32) -> Exchange:
        return self._reduce_to_master(values)
