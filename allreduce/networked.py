"""What all collectives over ZeroMQ share: a transport, codecs, a result buffer, and gathering partials in rank order."""

from abc import abstractmethod

import numpy as np

from allreduce.base import F32, Endpoints, Group, GroupSpec
from allreduce.transport import Transport
from tpi.wire import Float32, open_wire


class Networked(Group):
    """A group whose members exchange messages through a `Transport`, which groups of one node may share."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints, transport: Transport | None = None) -> None:
        super().__init__(spec)
        self._codec = open_wire(spec.wire)
        self._exact = Float32()
        self._total = np.empty(0, np.float32)
        self._own = np.empty(0, np.uint8)
        self.transport = transport or Transport(spec, endpoints, self.reach(spec), self.stats)

    @classmethod
    @abstractmethod
    def reach(cls, spec: GroupSpec) -> set[int]:
        """Ranks that this member exchanges messages with."""

    def begin(self, step: int) -> None:
        self.transport.begin(step)

    def close(self) -> None:
        self.transport.close()

    def _buffer(self, count: int) -> F32:
        """The result buffer, `count` values long; its content is whatever it was."""
        if self._total.size < count:
            self._total = np.empty(count, np.float32)
        return self._total[:count]

    def _as_sent(self, values: F32, out: F32) -> None:
        """Write to `out` what the others decode from `values`, so that all members add the same numbers."""
        if isinstance(self._codec, Float32):
            np.copyto(out, values)
            return
        size = self._codec.nbytes(values.size)
        if self._own.size < size:
            self._own = np.empty(size, np.uint8)
        self._codec.encode(values, self._own)
        self._codec.decode(self._own, out)

    def _gather(self, values: F32, number: int) -> F32:
        """The sum, in rank order, of all members' message `number`; `values` are this member's own."""
        total = self._buffer(values.size)
        if self.rank == 0:
            self._as_sent(values, total)
        else:
            self.transport.receive(0, number, total, self._codec)
        for rank in range(1, self.size):
            if rank == self.rank:
                self._add_own(values, total)
            else:
                self.transport.add(rank, number, total, self._codec)
        return total

    def _add_own(self, values: F32, total: F32) -> None:
        if isinstance(self._codec, Float32):
            np.add(total, values, out=total)
        else:
            own = np.empty_like(values)
            self._as_sent(values, own)
            np.add(total, own, out=total)
