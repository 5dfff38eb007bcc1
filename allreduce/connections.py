"""One member's ZeroMQ connections to the others: single frames out, single frames in, nothing known of their content.

A pair of members shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER.
"""

import errno
from collections.abc import Callable, Iterable
from contextlib import suppress
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
_send: Callable[..., object] = zmq.backend.Socket.send  # without pyzmq's outer layer, whose options are not needed here


def identity(spec: GroupSpec, rank: int) -> bytes:
    """Routing id of a member, which it chooses when it connects: the bound side knows who may speak without asking."""
    return b"T" + spec.session.to_bytes(8, "little") + spec.epoch.to_bytes(4, "little") + rank.to_bytes(2, "little")


class Connections:
    """Used by one thread at a time."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        if endpoints.net is None or (endpoints.router is None and spec.rank > 0):
            raise PlanError("a collective over the network needs a Net, and on workers a bound socket")
        self._spec = spec
        self._rank = spec.rank
        self._net = endpoints.net
        self._spin_s = spec.spin_us * 1e-6
        self._names = {rank: identity(spec, rank) for rank in range(spec.rank + 1)}
        self._ranks = {name: rank for rank, name in self._names.items() if rank < spec.rank}
        self._dealers: list[Socket] = []
        self._sockets: dict[int, Socket] = {}  # by rank
        if endpoints.router is not None:
            endpoints.router.rcvtimeo = endpoints.router.sndtimeo = _SLICE_MS
            self._sockets = dict.fromkeys(range(spec.rank), endpoints.router)

    def connect(self, reach: Iterable[int]) -> None:
        """Connect to those of `reach` that have a higher rank; the others connect to this node."""
        for rank in reach:
            if rank > self._rank and rank not in self._sockets:
                host, port = split_address(self._spec.peers[rank].address.removeprefix("tcp://"))
                dealer = self._net.connect(COLLECTIVE, host.strip("[]"), port, self._names[self._rank])
                dealer.rcvtimeo = dealer.sndtimeo = _SLICE_MS
                self._sockets[rank] = dealer
                self._dealers.append(dealer)

    def send(self, rank: int, frame: zmq.Frame | memoryview) -> bool:
        """Queue `frame` for `rank`; False if it could not be queued yet."""
        copy = isinstance(frame, memoryview)
        try:
            if rank < self._rank:
                _send(self._sockets[rank], self._names[rank], _MORE)
            _send(self._sockets[rank], frame, 0, copy)
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                sleep(_UNREACHED_S)
            elif error.errno != errno.EAGAIN:
                raise
            return False
        return True

    def receive(self, rank: int) -> tuple[int | None, zmq.Frame | None]:
        """The next sender and frame on the socket that `rank` uses, which several lower ranks share.

        Both are None if none came in a while; sender -1 is a stranger; a frame of None is not one frame.
        """
        socket = self._sockets[rank]
        try:
            frame = self._spin(socket) if self._spin_s else socket.recv(0, False)
            sender = rank
            if rank < self._rank:
                sender = self._ranks.get(frame.bytes, -1)
                if not frame.more:
                    return sender, None
                frame = socket.recv(0, False)
            return sender, _skip(socket, frame) if frame.more else frame
        except zmq.Again:
            return None, None

    def waiting(self) -> Iterable[tuple[int, zmq.Frame | None]]:
        """Everything that has come in already, without waiting."""
        for rank, socket in self._sockets.items():
            while socket.poll(0):
                sender, frame = self.receive(rank)
                if sender is not None:
                    yield sender, frame

    def close(self, linger: bool) -> None:
        """Close what this member connected; `linger`: deliver what is on its way first, in the background."""
        for dealer in self._dealers:
            dealer.close(_LINGER_MS if linger else 0)
        self._dealers.clear()

    def _spin(self, socket: Socket) -> zmq.Frame:
        """Poll for a while before sleeping: waking a thread takes longer than many an answer."""
        until = perf_counter() + self._spin_s
        while perf_counter() < until:
            with suppress(zmq.Again):
                return socket.recv(_NOBLOCK, False)
        return socket.recv(0, False)


def _skip(socket: Socket, frame: zmq.Frame) -> zmq.Frame | None:
    """Take the rest of a message of several frames, which no member sends, off the socket; None."""
    while frame.more:
        frame = socket.recv(0, False)
    return None
