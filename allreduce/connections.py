"""One member's ZeroMQ connections to the others, and the mailbox through which their frames pass.

A pair of members shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER.
"""

from collections.abc import Iterable
from importlib import import_module

from allreduce._mailbox import Mailbox
from allreduce.base import Endpoints, GroupSpec
from tpi.errors import PlanError
from tpi.sockets import COLLECTIVE, Socket, split_address

_SLICE_MS = 100  # how long one attempt to receive may take
_LINGER_MS = 500  # what a closing member may still have to deliver


def identity(spec: GroupSpec, rank: int) -> bytes:
    """Routing id of a member, which it chooses when it connects: the bound side knows who may speak without asking."""
    return b"T" + spec.session.to_bytes(8, "little") + spec.epoch.to_bytes(4, "little") + rank.to_bytes(2, "little")


def _library() -> str:
    """Where the libzmq is found that pyzmq's sockets belong to."""
    found = import_module("zmq.backend.cython._zmq").__file__
    assert found is not None
    return found


class Connections:
    """Used by one thread at a time."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        if endpoints.net is None or (endpoints.router is None and spec.rank > 0):
            raise PlanError("a collective over the network needs a Net, and on workers a bound socket")
        self._spec = spec
        self._net = endpoints.net
        self._dealers: dict[int, Socket] = {}  # by rank
        self.box = Mailbox(_library(), spec.rank, spec.size, spec.session, spec.epoch, spec.spin_us * 1e-6)
        if endpoints.router is not None:
            endpoints.router.rcvtimeo = _SLICE_MS
            for rank in range(spec.rank):
                self.box.connect(rank, endpoints.router.underlying, identity(spec, rank))

    def connect(self, reach: Iterable[int]) -> None:
        """Connect to those of `reach` that have a higher rank; the others connect to this node."""
        for rank in reach:
            if rank > self._spec.rank and rank not in self._dealers:
                host, port = split_address(self._spec.peers[rank].address.removeprefix("tcp://"))
                dealer = self._net.connect(COLLECTIVE, host.strip("[]"), port, identity(self._spec, self._spec.rank))
                dealer.rcvtimeo = _SLICE_MS
                self._dealers[rank] = dealer
                self.box.connect(rank, dealer.underlying, b"")

    def close(self, linger: bool) -> None:
        """Close what this member connected; `linger`: deliver what is on its way first, in the background."""
        self.box.close()
        for dealer in self._dealers.values():
            dealer.close(_LINGER_MS if linger else 0)
        self._dealers.clear()
