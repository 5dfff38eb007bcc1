"""One node's ZeroMQ sockets to the other nodes of a deployment, and the mailboxes that send and receive through them.

A pair of nodes shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER. All groups of a
node share its connections; the messages of each travel on a lane of their own.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module

from allreduce._mailbox import Frames, Mailbox
from allreduce.base import Endpoints, GroupSpec
from allreduce.deadline import Deadlines
from allreduce.flight import IN_FLIGHT
from tpi.errors import PlanError
from tpi.net.monitor import Socket
from tpi.net.sockets import COLLECTIVE, split_address

STEP_MASK = 0xFFFFFFFF  # frames carry the low 32 bits of a step's number
SEGMENT_VALUES = 1 << 16  # most values in a frame; longer messages are split, so that a slow link shows progress
_SLICE_MS = 100  # longest single attempt to receive, in milliseconds
_LINGER_MS = 500  # time in milliseconds for sending the last messages of a closing node


def identity(spec: GroupSpec, rank: int) -> bytes:
    """Return the routing id with which a node connects.

    Both sides compute it, so the bound side knows its peers in advance.
    """
    return b"T" + spec.session.to_bytes(8, "little") + spec.epoch.to_bytes(4, "little") + rank.to_bytes(2, "little")


def _library() -> str:
    """Return the path of pyzmq's extension module, through which the libzmq that pyzmq uses is found."""
    found = import_module("zmq.backend.cython._zmq").__file__
    assert found is not None
    return found


class Connections:
    """The connections of one node. Only one thread at a time may use them."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        """Prepare the connections of rank `spec.rank` among `spec.peers`, which are all nodes of the deployment.

        Raises:
            PlanError: if `endpoints` has no sockets.
        """
        if endpoints.net is None or (endpoints.router is None and spec.rank > 0):
            raise PlanError("a collective over the network needs a Net, and on workers a bound socket")
        self.spec = spec
        self._net, self._identity = endpoints.net, identity(spec, spec.rank)
        self._dealers: dict[int, Socket] = {}  # sockets connected to higher ranks, by rank
        self._boxes: list[Mailbox] = []
        spin_s = spec.spin_us * 1e-6
        self.frames = Frames(_library(), spec.rank, spec.size, spec.session, spec.epoch, spin_s)
        if endpoints.router is not None:
            endpoints.router.rcvtimeo = _SLICE_MS
            for rank in range(spec.rank):
                self.frames.connect(rank, endpoints.router.underlying, identity(spec, rank))
        self._late = Deadlines(spec, endpoints.watch, endpoints.lateness, endpoints.awaited)

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect to each of `ranks` above this node's rank. Lower ranks connect to this node."""
        for rank in ranks:
            if rank > self.spec.rank and rank not in self._dealers:
                peer = self.spec.peers[rank]
                host, port = split_address(peer.address.removeprefix("tcp://"))
                dealer = self._net.connect(COLLECTIVE, host.strip("[]"), port, self._identity, peer.key)
                dealer.rcvtimeo = _SLICE_MS
                self._dealers[rank] = dealer
                self.frames.connect(rank, dealer.underlying, b"")

    def open(self, lane: int, members: Sequence[int]) -> Mailbox:
        """Return the mailbox for the messages of `lane` (0 to 63) between the nodes of the ranks `members`.

        Its waits raise NodeLost, naming the node, when a deadline has passed.
        """
        box = Mailbox(self.frames, lane, members, SEGMENT_VALUES, IN_FLIGHT, self._late)
        self._boxes.append(box)
        return box

    def close(self) -> None:
        """Close the connections that this node made. Further calls do nothing.

        Messages on their way are still sent in the background, unless a node was lost.
        """
        failed = any(box.failed for box in self._boxes)
        for box in self._boxes:
            box.close()
        self.frames.close()
        for dealer in self._dealers.values():
            dealer.close(0 if failed else _LINGER_MS)
        self._dealers.clear()
