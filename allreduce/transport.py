"""Numbered messages of float32 values between the members of a group: framing, fencing, deadlines.

Messages of one step are numbered in the order in which the algorithm, the same on every member, uses them; a receiver
asks for one by sender and number, and what comes early waits in a stash. No arithmetic and no algorithm here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic

import numpy as np
import zmq

from allreduce.base import F32, Endpoints, GroupSpec, GroupStats
from allreduce.connections import Connections
from allreduce.deadline import extend
from allreduce.header import HEADER_BYTES, LAYOUT, MAGIC, SEGMENT_BITS, VERSION, Header, parse
from tpi.sockets import COLLECTIVE
from tpi.wire import Wire

SEGMENT_VALUES = 1 << 16  # in one frame; longer messages travel as several, so that a slow link shows progress
_STASH_FRAMES = 1024  # of all peers together; a member is never further ahead than one exchange
_SLOTS = 256
_SHARED_BYTES = 1 << 15

Slot = tuple[memoryview, Callable[[F32], None]]
_STEP_MASK = 0xFFFFFFFF


def _segments(values: F32) -> Iterable[tuple[int, F32]]:
    return ((0, values),) if values.size <= SEGMENT_VALUES else _cut(values)


def _cut(values: F32) -> Iterator[tuple[int, F32]]:
    for first in range(0, values.size, SEGMENT_VALUES):
        yield first // SEGMENT_VALUES, values[first : first + SEGMENT_VALUES]


class Transport:
    """One member's way to send and receive messages. Used by one thread at a time."""

    def __init__(self, spec: GroupSpec, endpoints: Endpoints, stats: GroupStats) -> None:
        self.spec = spec
        self.stats = stats
        self._connections = Connections(spec, endpoints)
        self._watch = endpoints.watch
        self._rank = spec.rank
        self._fences = [(peer.rank, spec.session, spec.epoch) for peer in spec.peers]
        self._slots: dict[tuple[int, int], Slot] = {}  # by wire format and number of values
        self._stash: dict[tuple[int, int, int], zmq.Frame] = {}  # by rank, step, tag
        self._scratch = np.empty(COLLECTIVE.frame_bytes, np.uint8)
        self._step = 0
        self._number = 0  # of the next message of the step
        self._oldest = 0  # of the first message of the exchange under way
        self._failed = False

    def connect(self, reach: Iterable[int]) -> None:
        """Make sure that messages can go to `reach`."""
        self._connections.connect(reach)

    def begin(self, step: int) -> None:
        """Go to `step` and forget what is left of earlier ones."""
        self._step, self._number, self._oldest = step & _STEP_MASK, 0, 0
        stale = [key for key in self._stash if key[1] < self._step]
        for key in stale:
            del self._stash[key]
        self.stats.dropped += len(stale)

    def reserve(self, messages: int) -> int:
        """Number of the first of the `messages` messages of the next exchange."""
        self._oldest = self._number
        self._number += messages
        return self._oldest

    def send(self, ranks: Sequence[int], number: int, values: F32, wire: Wire) -> None:
        """Send `values` to each of `ranks` as message `number`; `values` may change when this returns."""
        for segment, part in _segments(values):
            data, encode = self._slots.get((wire.code, part.size)) or self._slot(wire, part.size)
            tag = number << SEGMENT_BITS | segment
            LAYOUT.pack_into(data, 0, MAGIC, VERSION, wire.code, *self._fences[self._rank], self._step, tag, part.size)
            encode(part)
            # One copy that several queues share pays off only where copying is dear.
            frame = zmq.Frame(data, copy=True) if len(ranks) > 1 and len(data) > _SHARED_BYTES else data
            for rank in ranks:
                if not self._connections.send(rank, frame):
                    self._insist(rank, frame)
            self.stats.sent_bytes += len(data) * len(ranks)

    def receive(self, rank: int, number: int, out: F32, wire: Wire) -> None:
        """Write the values of message `number` of `rank` to `out`."""
        for segment, part in _segments(out):
            wire.decode(self._segment(rank, number, segment, part.size, wire), part, HEADER_BYTES)

    def add(self, rank: int, number: int, total: F32, wire: Wire) -> None:
        """Add the values of message `number` of `rank` to `total`."""
        for segment, part in _segments(total):
            wire.add(self._segment(rank, number, segment, part.size, wire), part, HEADER_BYTES)

    def close(self) -> None:
        """Close the connections that this member made. What is on its way is delivered, unless a member was lost."""
        self._connections.close(linger=not self._failed)
        self._stash.clear()

    def _slot(self, wire: Wire, count: int) -> Slot:
        """Where a frame of `count` values is put together, and what encodes its payload. All share their memory."""
        if len(self._slots) >= _SLOTS:
            self._slots.clear()
        end = HEADER_BYTES + wire.nbytes(count)
        self._slots[wire.code, count] = slot = self._scratch[:end].data, wire.encoder(self._scratch[HEADER_BYTES:end])
        return slot

    def _segment(self, rank: int, number: int, segment: int, count: int, wire: Wire) -> memoryview:
        """One frame, header included, waited for until the deadline."""
        tag = number << SEGMENT_BITS | segment
        expected = (MAGIC, VERSION, wire.code, *self._fences[rank], self._step, tag, count)
        size = HEADER_BYTES + wire.nbytes(count)
        frame = self._stash.pop((rank, self._step, tag), None) if self._stash else None
        deadline = 0.0  # not known before the first wait
        while True:
            if frame is not None:
                data = frame.buffer
                if len(data) == size and LAYOUT.unpack_from(data) == expected:
                    self.stats.received_bytes += size
                    return data
                self._keep(rank, frame)
            sender, frame = self._connections.receive(rank)
            if sender == rank and frame is not None:
                continue
            if sender is not None:
                self._keep(sender, frame)
                frame = None
            if sender is None or monotonic() > deadline:
                deadline = self._extend(rank, deadline)

    def _keep(self, sender: int, frame: zmq.Frame | None) -> None:
        """Stash a frame that is early; drop one that is anything else."""
        header = parse(frame.buffer) if frame is not None else None
        if frame is None or header is None or not self._early(sender, header) or len(self._stash) >= _STASH_FRAMES:
            self.stats.dropped += 1
        else:
            self._stash[sender, header.step, header.tag] = frame

    def _early(self, sender: int, header: Header) -> bool:
        """Whether a frame belongs to the exchange under way or to one that follows."""
        if sender < 0 or (header.rank, header.session, header.epoch) != self._fences[sender]:
            return False
        return (header.step, header.tag >> SEGMENT_BITS) >= (self._step, self._oldest)

    def _insist(self, rank: int, frame: zmq.Frame | memoryview) -> None:
        """Go on trying to send, taking in what the others send meanwhile, so that no two members block each other."""
        deadline = 0.0
        while True:
            for sender, early in self._connections.waiting():
                self._keep(sender, early)
            if self._connections.send(rank, frame):
                return
            deadline = self._extend(rank, deadline)

    def _extend(self, rank: int, deadline: float) -> float:
        """See `deadline.extend`."""
        try:
            return extend(self.spec, self._watch, rank, deadline)
        except BaseException:
            self._failed = True
            raise
