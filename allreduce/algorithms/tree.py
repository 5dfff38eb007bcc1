"""Tree: sums travel up a binary tree of ranks to the master, and the total travels down again.

It takes about 2 log2(n) one-way latencies; no node's adapter carries more than 3 payloads each way. Partial sums travel
in the group's wire format, the total in f32. All nodes hold the same sum, but it is not added in rank order.
"""

import numpy as np

from allreduce.base import F32
from allreduce.flight import Exchange
from allreduce.networked import Networked
from tpi.net.wire import EXACT


class Tree(Networked):
    """A group in which the parent of rank r is rank (r - 1) // 2."""

    name = "tree"

    @property
    def overlaps(self) -> bool:
        """False: a node must receive a sum before it can pass the sum on, so no sum advances in the background."""
        return False

    def partners(self) -> set[int]:
        """Return the ranks of the parent and of up to two children."""
        return {*self._parent, *self._children}

    @property
    def _parent(self) -> tuple[int, ...]:
        return ((self.rank - 1) // 2,) if self.rank else ()

    @property
    def _children(self) -> tuple[int, ...]:
        return tuple(child for child in (2 * self.rank + 1, 2 * self.rank + 2) if child < self.size)

    def _allreduce(self, values: F32) -> Exchange:
        number = self.box.reserve(2)
        total = yield from self._up(values, number)
        for parent in self._parent:
            self.box.receive(parent, number + 1, total, EXACT.code)
        self.box.send(self._children, number + 1, total, EXACT.code)
        return total

    def _reduce(self, values: F32) -> Exchange:
        return self._up(values, self.box.reserve(1))

    def _up(self, values: F32, number: int) -> Exchange:
        """Sum the subtree below this node, send the sum to the parent, and return the sum.

        The master's subtree is the whole group.
        """
        if not self._children:
            self.box.send(self._parent, number, values, self.code)
        yield
        total = self._buffer(values)
        np.copyto(total, values)
        for child in self._children:
            self.box.add(child, number, total, self.code)
        if self._children:
            self.box.send(self._parent, number, total, self.code)
        return total
