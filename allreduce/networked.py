"""Common base of the collectives over ZeroMQ: a transport, a wire format, result buffers, and sums in rank order."""

from abc import abstractmethod
from collections import deque

import numpy as np

from allreduce.base import F32, Endpoints, Group, GroupSpec, GroupStats
from allreduce.flight import IN_FLIGHT, Exchange
from allreduce.transport import Transport
from tpi.net.wire import wire_format


class Networked(Group):
    """A group whose nodes exchange messages through a `Transport`, which several groups of one node may share.

    Algorithms use the transport's mailbox directly, as `box`, because further Python calls for each block would take
    noticeable time.
    """

    def __init__(self, spec: GroupSpec, endpoints: Endpoints, transport: Transport | None = None) -> None:
        super().__init__(spec)
        self.code = wire_format(spec.wire).code
        self._totals = deque([np.empty(0, np.float32)] * IN_FLIGHT)
        # rotated, so that the nodes do not all send to the same node first
        self.others = tuple((spec.rank + step) % spec.size for step in range(1, spec.size))
        self.transport = transport or Transport(spec, endpoints)
        self.transport.connect(self.partners())
        self.box = self.transport.box

    @abstractmethod
    def partners(self) -> set[int]:
        """Return the ranks that this node exchanges messages with."""

    @property
    def overlaps(self) -> bool:
        """True: a sum makes progress while its nodes compute."""
        return True

    @property
    def stats(self) -> GroupStats:
        """Totals since the group was opened, with the bytes that its connections carried."""
        return self.transport.with_traffic(self._stats)

    def _begin(self, step: int) -> None:
        self.transport.begin(step)

    def close(self) -> None:
        """Close the connections that this node made."""
        self.transport.close()

    def _buffer(self, values: F32) -> F32:
        """Return a result buffer shaped like `values`: a different buffer for each sum under way.

        The content of the buffer is undefined.
        """
        totals = self._totals
        totals.rotate()
        if totals[0].shape != values.shape:
            totals[0] = np.empty_like(values)
        return totals[0]

    def _reduce_to_master(self, values: F32) -> Exchange:
        """Return a generator that sums the `values` of all nodes on the master, in rank order.

        The sum takes one latency, and the master's link carries n - 1 payloads.
        """
        number = self.box.reserve(1)
        if self.rank:
            self.box.send((0,), number, values, self.code)
        yield
        if self.rank:
            return values
        total = self._buffer(values)
        self.box.sum(number, values, total, self.code)
        return total
