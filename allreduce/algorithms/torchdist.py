"""torch.distributed (Gloo) as the collective, for networks faster than a home network.

Gloo connects every pair of nodes itself, so the master listens too, on a port that the system picks. Rank 1 holds the
store in which the nodes find each other. Values travel in f32, and the sum is not added in rank order. torch is
imported when such a group is opened.
"""

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from allreduce.base import F32, Endpoints, Group, GroupSpec, Peer
from allreduce.flight import Exchange
from allreduce.transport import Transport
from tpi.errors import NodeLost, UsageError
from tpi.net.sockets import split_address
from tpi.net.wire import EXACT

if TYPE_CHECKING:
    from tpi.net.messages import PeerAddress

_STORE_RANK = 1


def refuse_keys(peers: "Iterable[Peer | PeerAddress]") -> None:
    """Raise UsageError if a connection to one of `peers` needs a key, because Gloo's connections have none."""
    if named := ", ".join(peer.name for peer in peers if peer.key):
        raise UsageError(
            f"the collective 'torch' opens connections without keys to {named}; choose another --collective, or give "
            "--no-keys to all nodes if you trust every machine in that network"
        )


class TorchDistributed(Group):
    """A group that sums with Gloo. Its process group is separate from torch's default one."""

    name = "torch"

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        super().__init__(spec)
        self.wire = "f32"
        refuse_keys(spec.peers)
        self._transport = Transport(spec, endpoints)
        try:
            self._group = self._open()
        except RuntimeError as error:
            raise self._lost(error) from error

    @property
    def overlaps(self) -> bool:
        """True: Gloo sums in the background."""
        return True

    def _begin(self, step: int) -> None:
        """Do nothing, because Gloo's messages have no step number."""

    def close(self) -> None:
        """Close Gloo's connections and the connections to which Gloo's port was sent."""
        self._group = None
        self._transport.close()

    def _allreduce(self, values: F32) -> Exchange:
        return self._sum("allreduce", values)

    def _reduce(self, values: F32) -> Exchange:
        return self._sum("reduce", values)

    def _sum(self, operation: str, values: F32) -> Exchange:
        import torch

        total: F32 = values.copy()
        try:
            work = getattr(self._group, operation)([torch.from_numpy(total)])
            yield
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        self.stats.sent_bytes += values.nbytes
        self.stats.received_bytes += values.nbytes
        return total

    def _open(self) -> Any:
        try:
            from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
        except ImportError:
            raise UsageError(
                "the collective 'torch' needs PyTorch with Gloo; install torch, or choose another --collective"
            ) from None
        limit = timedelta(seconds=self.spec.timeout_s)
        host, _ = split_address(self.spec.peers[_STORE_RANK].address.removeprefix("tcp://"))
        host = host.strip("[]")
        mine = self.rank == _STORE_RANK
        store = TCPStore(host, 0, self.size, True, limit, wait_for_workers=False) if mine else None
        port = self._agree(store.port if store else 0)
        store = store or TCPStore(host, port, self.size, False, limit)
        options = ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(hostname=self._own_address(host, port))]
        fenced = PrefixStore(f"{self.spec.session}/{self.spec.epoch}", store)
        return ProcessGroupGloo(fenced, self.rank, self.size, options)

    def _agree(self, port: int) -> int:
        """Return the port at which every node finds the store.

        The node that holds the store sends `port` to the others.
        """
        others = tuple(rank for rank in range(self.size) if rank != _STORE_RANK)
        self._transport.connect(others if self.rank == _STORE_RANK else (_STORE_RANK,))
        box, word = self._transport.box, np.array([port], np.float32)
        if self.rank == _STORE_RANK:
            box.send(others, box.reserve(1), word, EXACT.code)
        else:
            box.receive(_STORE_RANK, box.reserve(1), word, EXACT.code)
        return int(word[0])

    def _own_address(self, host: str, port: int) -> str:
        """Return the address of the interface over which this node reaches the store."""
        family = socket.getaddrinfo(host, port)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])

    def _lost(self, error: RuntimeError) -> NodeLost:
        others = ", ".join(peer.name for peer in self.spec.peers if peer.rank != self.rank)
        return NodeLost(
            others, f"torch.distributed lost the connection to one of {others} ({str(error).splitlines()[0]})"
        )
