"""What the collectives over ZeroMQ share: a transport, codecs, a result buffer, and sums in rank order."""

from abc import abstractmethod
from collections import deque

import numpy as np

from allreduce.base import F32, Endpoints, Group, GroupSpec
from allreduce.flight import IN_FLIGHT, Exchange
from allreduce.transport import Transport
from tpi.wire import Bytes, Float32, open_wire


class Networked(Group):
    """A group whose members exchange messages through a `Transport`, which several groups of one node may share."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints, transport: Transport | None = None) -> None:
        super().__init__(spec)
        self._codec = open_wire(spec.wire)
        self._exact = Float32()
        self._totals = deque([np.empty(0, np.float32)] * IN_FLIGHT)
        self._own = np.empty(0, np.float32)
        self._raw: Bytes = np.empty(0, np.uint8)
        # in turns, so that not everyone sends to the same member first
        self.others = tuple((spec.rank + step) % spec.size for step in range(1, spec.size))
        self.transport = transport or Transport(spec, endpoints, self.stats)
        self.transport.connect(self.reach())

    @abstractmethod
    def reach(self) -> set[int]:
        """Ranks that this member exchanges messages with."""

    @property
    def overlaps(self) -> bool:
        """See `Group.overlaps`."""
        return True

    def _begin(self, step: int) -> None:
        self.transport.begin(step)

    def close(self) -> None:
        """Close the connections that this member made."""
        self.transport.close()

    def _buffer(self, count: int) -> F32:
        """A result buffer, `count` values long, for each sum under way in turn; its content is whatever it was."""
        self._totals.rotate()
        if self._totals[0].size < count:
            self._totals[0] = np.empty(count, np.float32)
        return self._totals[0][:count]

    def _as_received(self, values: F32) -> F32:
        """What the others decode when this member sends `values`, so that all add the same numbers."""
        if self.wire == "f32":
            return values
        if self._own.size < values.size:
            self._own = np.empty(values.size, np.float32)
            self._raw = np.empty(self._codec.nbytes(values.size), np.uint8)
        out = self._own[: values.size]
        self._codec.encode(values, self._raw)
        self._codec.decode(self._raw, out)
        return out

    def _gather(self, values: F32, number: int, total: F32) -> None:
        """Write to `total` the sum in rank order of all members' message `number`; `values` are this member's own."""
        own = self._as_received(values)
        if self._codec.native:
            self.transport.sum(number, own, total, self._codec)
            return
        for rank in range(self.size):
            if rank == self.rank:
                np.copyto(total, own) if rank == 0 else np.add(total, own, out=total)
            elif rank == 0:
                self.transport.receive(rank, number, total, self._codec)
            else:
                self.transport.add(rank, number, total, self._codec)

    def _reduce_to_master(self, values: F32) -> Exchange:
        """Everyone sends to the master, which sums in rank order: one latency, n - 1 payloads on the master's link."""
        number = self.transport.reserve(1)
        if self.rank:
            self.transport.send((0,), number, values, self._codec)
        yield
        if self.rank:
            return values
        total = self._buffer(values.size)
        self._gather(values, number, total)
        return total
