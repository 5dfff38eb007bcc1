"""One node's ZeroMQ connections to the others, and the mailbox that carries its messages.

A pair of nodes shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER. Messages of a step
are numbered in the order in which the algorithm, the same on every node, uses them. A receiver asks for a message by
sender and number. The work per message is done in C++ (`allreduce._mailbox`). This module contains no algorithm.
"""

from collections.abc import Iterable
from importlib import import_module

from allreduce._mailbox import Mailbox
from allreduce.base import Endpoints, GroupSpec, GroupStats
from allreduce.deadline import Deadlines
from allreduce.flight import IN_FLIGHT
from tpi.errors import PlanError
from tpi.net.monitor import Socket
from tpi.net.sockets import COLLECTIVE, split_address

SEGMENT_VALUES = 1 << 16  # most values in a frame; longer messages are split, so that a slow link shows progress
_SLICE_MS = 100  # longest single attempt to receive
_LINGER_MS = 500  # time for the last messages of a closing node to be sent
_STEP_MASK = 0xFFFFFFFF


def identity(spec: GroupSpec, rank: int) -> bytes:
    """Return the routing id with which a node connects.

    Both sides compute it, so the bound side knows its peers in advance.
    """
    return b"T" + spec.session.to_bytes(8, "little") + spec.epoch.to_bytes(4, "little") + rank.to_bytes(2, "little")


def _library() -> str:
    """Return the path of pyzmq's extension module, through which its libzmq is found."""
    found = import_module("zmq.backend.cython._zmq").__file__
    assert found is not None
    return found


class Transport:
    """The connections of one node. Used by one thread at a time.

    Algorithms call `box` directly. It sends from and receives into float32 arrays. Its waits raise NodeLost, naming the
    node, when a deadline has passed.
    """

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        if endpoints.net is None or (endpoints.router is None and spec.rank > 0):
            raise PlanError("a collective over the network needs a Net, and on workers a bound socket")
        self.spec = spec
        self._net = endpoints.net
        self._dealers: dict[int, Socket] = {}  # by rank
        self.box = Mailbox(
            _library(),
            spec.rank,
            spec.size,
            spec.session,
            spec.epoch,
            spec.spin_us * 1e-6,
            SEGMENT_VALUES,
            IN_FLIGHT,
            Deadlines(spec, endpoints.watch, endpoints.lateness),
        )
        if endpoints.router is not None:
            endpoints.router.rcvtimeo = _SLICE_MS
            for rank in range(spec.rank):
                self.box.connect(rank, endpoints.router.underlying, identity(spec, rank))

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect to those of `ranks` that are above this node's rank. Lower ranks connect to this node."""
        for rank in ranks:
            if rank > self.spec.rank and rank not in self._dealers:
                peer = self.spec.peers[rank]
                host, port = split_address(peer.address.removeprefix("tcp://"))
                own = identity(self.spec, self.spec.rank)
                dealer = self._net.connect(COLLECTIVE, host.strip("[]"), port, own, peer.key)
                dealer.rcvtimeo = _SLICE_MS
                self._dealers[rank] = dealer
                self.box.connect(rank, dealer.underlying, b"")

    def begin(self, step: int) -> None:
        """Begin step number `step`, and drop messages of earlier steps."""
        self.box.begin(step & _STEP_MASK)

    def with_traffic(self, stats: GroupStats) -> GroupStats:
        """Fill in the bytes sent and received and the dropped frames of `stats`, and return it."""
        stats.sent_bytes, stats.received_bytes = self.box.sent_bytes, self.box.received_bytes
        stats.dropped = self.box.dropped
        return stats

    def close(self) -> None:
        """Close the connections that this node made.

        Messages on their way are still sent in the background, unless a node was lost.
        """
        self.box.close()
        for dealer in self._dealers.values():
            dealer.close(0 if self.box.failed else _LINGER_MS)
        self._dealers.clear()
