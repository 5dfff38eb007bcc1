"""Numbered messages of float32 values between the members of a group over ZeroMQ: framing, fencing, deadlines.

A pair of members shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER. No arithmetic and no
algorithm here. Messages of one step are numbered in the order in which the algorithm, the same on
every member, uses them; a receiver asks for one by sender and number, and what comes early waits in a stash.
"""

from collections.abc import Iterable, Iterator
from time import monotonic, perf_counter, sleep

import numpy as np
import zmq

from allreduce.base import F32, Endpoints, GroupSpec, GroupStats
from allreduce.header import HEADER_BYTES, SEGMENT_BITS, Header, message_tag, parse
from tpi.errors import NodeLost, PlanError
from tpi.sockets import COLLECTIVE, Socket, split_address
from tpi.wire import Bytes, Wire

SEGMENT_VALUES = 1 << 16  # in one frame; longer messages travel as several, so that a slow link shows progress
_SLICE_MS = 100  # how often a wait looks up
_STASH_FRAMES = 1024  # of all peers together; a member is never further ahead than one exchange
_LINGER_MS = 500  # what a closing member may still have to deliver
_STEP_MASK = 0xFFFFFFFF
_UNREACHED_S = 0.002  # pause before sending again to a member that has not connected yet


def _segments(values: F32) -> Iterator[tuple[int, F32]]:
    for first in range(0, max(values.size, 1), SEGMENT_VALUES):
        yield first // SEGMENT_VALUES, values[first : first + SEGMENT_VALUES]


def _identity(spec: GroupSpec, rank: int) -> bytes:
    """Routing id of a member: chosen by the connecting side, so the bound side knows who may speak, without a handshake."""
    return b"T" + spec.session.to_bytes(8, "little") + spec.epoch.to_bytes(4, "little") + rank.to_bytes(2, "little")


def _sliced(socket: Socket) -> Socket:
    socket.rcvtimeo = socket.sndtimeo = _SLICE_MS
    return socket


class Transport:
    """The connections of one member of a group to the members in `reach`."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints, reach: Iterable[int], stats: GroupStats) -> None:
        if endpoints.net is None or (endpoints.router is None and spec.rank > 0):
            raise PlanError("a collective over the network needs a Net, and on workers a bound socket")
        self.spec = spec
        self.stats = stats
        self._net = endpoints.net
        self._router = endpoints.router and _sliced(endpoints.router)
        self._watch = endpoints.watch
        self._names = {peer.rank: _identity(spec, peer.rank) for peer in spec.peers}
        self._ranks = {name: rank for rank, name in self._names.items() if rank < spec.rank}
        self._dealers: dict[int, Socket] = {}
        self._stash: dict[tuple[int, int, int], zmq.Frame] = {}  # by rank, step, tag
        self._scratch = np.empty(COLLECTIVE.frame_bytes, np.uint8)
        self._step = 0
        self._number = 0  # of the next message of the step
        self._oldest = 0  # of the first message of the exchange under way
        self._failed = False
        self.connect(reach)

    def connect(self, reach: Iterable[int]) -> None:
        """Connect to those of `reach` that have a higher rank; the others connect to this node."""
        for rank in reach:
            if rank > self.spec.rank and rank not in self._dealers:
                host, port = split_address(self.spec.peers[rank].address.removeprefix("tcp://"))
                dealer = self._net.connect(COLLECTIVE, host.strip("[]"), port, self._names[self.spec.rank])
                self._dealers[rank] = _sliced(dealer)

    def begin(self, step: int) -> None:
        """Go to `step` and forget what is left of earlier ones."""
        self._step, self._number, self._oldest = step & _STEP_MASK, 0, 0
        stale = [key for key in self._stash if key[1] < self._step]
        for key in stale:
            del self._stash[key]
        self.stats.dropped += len(stale)

    def reserve(self, messages: int) -> int:
        """Number of the first of the next `messages` messages of the step."""
        self._oldest = self._number
        self._number += messages
        return self._oldest

    def send(self, ranks: Iterable[int], number: int, values: F32, wire: Wire) -> None:
        """Send `values` to each of `ranks` as message `number`; `values` may change when this returns."""
        spec, ranks = self.spec, tuple(ranks)
        for segment, part in _segments(values):
            tag = message_tag(number, segment)
            header = Header(wire.code, spec.rank, spec.session, spec.epoch, self._step, tag, part.size)
            end = HEADER_BYTES + wire.nbytes(part.size)
            self._scratch[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
            wire.encode(part, self._scratch[HEADER_BYTES:end])
            frame = zmq.Frame(self._scratch[:end].data, copy=True)  # one copy that all peers' queues share
            for rank in ranks:
                self._send(rank, frame)
            self.stats.sent_bytes += end * len(ranks)

    def receive(self, rank: int, number: int, out: F32, wire: Wire) -> None:
        """Write the values of message `number` of `rank` to `out`."""
        for segment, part in _segments(out):
            wire.decode(self._payload(rank, message_tag(number, segment), part.size, wire), part)

    def add(self, rank: int, number: int, total: F32, wire: Wire) -> None:
        """Add the values of message `number` of `rank` to `total`."""
        for segment, part in _segments(total):
            wire.add(self._payload(rank, message_tag(number, segment), part.size, wire), part)

    def close(self) -> None:
        """Close the connections that this member made. What is on its way is delivered, unless a member was lost."""
        for socket in self._dealers.values():
            socket.close(0 if self._failed else _LINGER_MS)
        self._dealers.clear()
        self._stash.clear()

    def _payload(self, rank: int, tag: int, count: int, wire: Wire) -> Bytes:
        spec = self.spec
        expected = Header(wire.code, rank, spec.session, spec.epoch, self._step, tag, count).pack()
        size = HEADER_BYTES + wire.nbytes(count)
        frame = self._stash.pop((rank, self._step, tag), None)
        deadline = monotonic() + spec.timeout_s
        while True:
            if frame is not None:
                raw = np.frombuffer(frame.buffer, np.uint8)
                if raw.size == size and raw[:HEADER_BYTES].tobytes() == expected:
                    self.stats.received_bytes += size
                    return raw[HEADER_BYTES:]
                self._keep(rank, frame)
            frame, deadline = self._next(rank, deadline)

    def _next(self, rank: int, deadline: float) -> tuple[zmq.Frame | None, float]:
        """The next frame that comes from `rank` (those of other members are stashed), and the deadline as it is then."""
        socket = self._dealers.get(rank, self._router)
        assert socket is not None
        try:
            frames = self._poll(socket)
        except zmq.Again:
            return None, self._extend(rank, deadline)
        if socket is not self._router:
            sender: int | None = rank
        else:
            sender = self._ranks.get(frames.pop(0).bytes)
        if sender is None or len(frames) != 1:
            self.stats.dropped += 1
        elif sender == rank:
            return frames[0], deadline
        else:
            self._keep(sender, frames[0])
        return None, deadline if monotonic() < deadline else self._extend(rank, deadline)

    def _poll(self, socket: Socket) -> list[zmq.Frame]:
        if self.spec.spin_us:
            until = perf_counter() + self.spec.spin_us * 1e-6
            while perf_counter() < until:
                try:
                    return socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    continue
        return socket.recv_multipart(copy=False)

    def _keep(self, sender: int, frame: zmq.Frame) -> None:
        """Stash a frame that is early; drop one that is anything else."""
        header = parse(frame.buffer)
        spec = self.spec
        fenced = header is not None and (header.rank, header.session, header.epoch) == (sender, spec.session, spec.epoch)
        if header is None or not fenced or not self._early(header) or len(self._stash) >= _STASH_FRAMES:
            self.stats.dropped += 1
        else:
            self._stash[sender, header.step, header.tag] = frame

    def _early(self, header: Header) -> bool:
        if header.step != self._step:
            return header.step > self._step
        return header.tag >> SEGMENT_BITS >= self._oldest

    def _send(self, rank: int, frame: zmq.Frame) -> None:
        deadline = monotonic() + self.spec.timeout_s
        while True:
            try:
                if rank in self._dealers:
                    self._dealers[rank].send(frame, copy=False)
                else:
                    self._answer(rank, frame)
                return
            except zmq.Again:
                deadline = self._extend(rank, deadline)

    def _answer(self, rank: int, frame: zmq.Frame) -> None:
        """Send to a member of lower rank, over the connection that it made. Raises zmq.Again when it is not there."""
        assert self._router is not None
        try:
            self._router.send(self._names[rank], zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            sleep(_UNREACHED_S)
            raise zmq.Again from error
        self._router.send(frame, copy=False)

    def _extend(self, rank: int, deadline: float) -> float:
        """The deadline of a wait for `rank` that has got nothing yet. Raises NodeLost when it has passed."""
        if self._watch is not None and self._watch(rank):
            return monotonic() + self.spec.timeout_s
        if monotonic() < deadline:
            return deadline
        self._failed = True
        peer = self.spec.peers[rank]
        raise NodeLost(
            peer.name,
            f"{peer.name} (rank {rank}) did not answer for {self.spec.timeout_s:g} s during a sum; "
            "check that it is running and can be reached, then start again",
        )
