"""One member's ZeroMQ connections to the others: single frames out, single frames in, nothing known of their content.

A pair of members shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER.
"""

import errno
from collections.abc import Iterable
from time import perf_counter, sleep

import zmq

from allreduce.base import Endpoints, GroupSpec
from tpi.errors import PlanError
from tpi.sockets import COLLECTIVE, Socket, split_address

_SLICE_MS = 100  # how long one attempt to send or receive may take
_LINGER_MS = 500  # what a closing member may still have to deliver
_UNREACHED_S = 0.002  # pause before trying again to send to a member that has not connected yet
_MORE = int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)


def identity(spec: GroupSpec, rank: int) -> bytes:
    """Routing id of a member, which it chooses when it connects: the bound side knows who may speak without asking."""
    return b"T" + spec.session.to_bytes(8, "little") + spec.epoch.to_bytes(4, "little") + rank.to_bytes(2, "little")


class Connections:
    """Used by one thread at a time."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        if endpoints.net is None or (endpoints.router is None and spec.rank > 0):
            raise PlanError("a collective over the network needs a Net, and on workers a bound socket")
        self._spec = spec
        self._net = endpoints.net
        self._router = endpoints.router
        self._spin_s = spec.spin_us * 1e-6
        self._names = {rank: identity(spec, rank) for rank in range(spec.rank + 1)}
        self._ranks = {name: rank for rank, name in self._names.items() if rank < spec.rank}
        self._dealers: dict[int, Socket] = {}
        if self._router is not None:
            self._router.rcvtimeo = self._router.sndtimeo = _SLICE_MS

    def connect(self, reach: Iterable[int]) -> None:
        """Connect to those of `reach` that have a higher rank; the others connect to this node."""
        for rank in reach:
            if rank > self._spec.rank and rank not in self._dealers:
                host, port = split_address(self._spec.peers[rank].address.removeprefix("tcp://"))
                dealer = self._net.connect(COLLECTIVE, host.strip("[]"), port, self._names[self._spec.rank])
                dealer.rcvtimeo = dealer.sndtimeo = _SLICE_MS
                self._dealers[rank] = dealer

    def send(self, rank: int, frame: zmq.Frame | memoryview) -> bool:
        """Queue `frame` for `rank`; False if it could not be queued yet."""
        copy = isinstance(frame, memoryview)
        try:
            dealer = self._dealers.get(rank)
            if dealer is not None:
                dealer.send(frame, 0, copy)
            else:
                self._router.send(self._names[rank], _MORE)  # type: ignore[union-attr]
                self._router.send(frame, 0, copy)  # type: ignore[union-attr]
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                sleep(_UNREACHED_S)
            elif error.errno != errno.EAGAIN:
                raise
            return False
        return True

    def receive(self, rank: int) -> tuple[int, zmq.Frame | None] | None:
        """The next sender and frame on the socket that `rank` uses, None if none came in a while.

        Several lower ranks use one socket. The frame is None if what came was not one frame of a member.
        """
        socket = self._dealers.get(rank)
        if socket is not None:
            frame = self._poll(socket)
            return None if frame is None else (rank, _only(socket, frame))
        socket = self._router
        assert socket is not None
        first = self._poll(socket)
        if first is None:
            return None
        sender = self._ranks.get(first.bytes, -1)
        frame = _only(socket, socket.recv(0, False)) if first.more else None
        return sender, frame if sender >= 0 else None

    def waiting(self) -> Iterable[tuple[int, zmq.Frame | None]]:
        """Everything that has come in already, without waiting."""
        for rank in (0, *self._dealers):
            socket = self._dealers.get(rank, self._router)
            while socket is not None and socket.poll(0):
                received = self.receive(rank)
                if received is not None:
                    yield received

    def close(self, linger: bool) -> None:
        """Close what this member connected; `linger`: deliver what is on its way first, in the background."""
        for dealer in self._dealers.values():
            dealer.close(_LINGER_MS if linger else 0)
        self._dealers.clear()

    def _poll(self, socket: Socket) -> zmq.Frame | None:
        if self._spin_s:
            until = perf_counter() + self._spin_s
            while perf_counter() < until:
                frame = _receive(socket, _NOBLOCK)
                if frame is not None:
                    return frame
        return _receive(socket, 0)


def _receive(socket: Socket, flags: int) -> zmq.Frame | None:
    try:
        return socket.recv(flags, False)
    except zmq.Again:
        return None


def _only(socket: Socket, frame: zmq.Frame) -> zmq.Frame | None:
    """`frame` if it is its message's last; else None, and the rest of the message is taken off the socket."""
    if not frame.more:
        return frame
    while frame.more:
        frame = socket.recv(0, False)
    return None
