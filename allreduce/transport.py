"""Numbered messages of float32 values between the members of a group: framing, segments, deadlines.

Messages of one step are numbered in the order in which the algorithm, the same on every member, uses them; a receiver
asks for one by sender and number. Frames and their fences are `allreduce._mailbox`'s, in C++: a node of a home cluster
handles a few hundred of them per token. No algorithm here.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from time import sleep

import numpy as np

from allreduce.base import F32, Endpoints, GroupSpec, GroupStats
from allreduce.connections import Connections
from allreduce.deadline import extend
from allreduce.flight import IN_FLIGHT
from allreduce.header import HEADER_BYTES, SEGMENT_BITS
from tpi.wire import Bytes, Wire

SEGMENT_VALUES = 1 << 16  # in one frame; longer messages travel as several, so that a slow link shows progress
_REFUSED_S = 0.002  # before who did not take a frame is asked again
_STEP_MASK = 0xFFFFFFFF

Message = tuple[Sequence[int], int, F32]
"""The ranks it goes to, its number, its values."""
_Part = tuple[int, int, F32]  # a segment that is still to be sent: rank, tag, values


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
        self._box = self._connections.box
        self._watch = endpoints.watch
        self._raw = np.empty(0, np.uint8)  # a payload that only its `Wire` reads and writes
        self._number = 0  # of the next message of the step
        self._under_way = deque[int](maxlen=IN_FLIGHT)  # first numbers of the last exchanges
        self._failed = False

    def connect(self, reach: Iterable[int]) -> None:
        """Make sure that messages can go to `reach`."""
        self._connections.connect(reach)

    def begin(self, step: int) -> None:
        """Go to `step` and forget what is left of earlier ones."""
        self._number = 0
        self._under_way.clear()
        self._box.begin(step & _STEP_MASK)
        self.stats.dropped += self._box.take_dropped()

    def reserve(self, messages: int) -> int:
        """Number of the first of the `messages` messages of the next exchange."""
        first = self._number
        self._number += messages
        self._under_way.append(first)
        self._box.reserve(self._under_way[0])
        return first

    def send(self, ranks: Sequence[int], number: int, values: F32, wire: Wire) -> None:
        """Send `values` to each of `ranks` as message `number`; `values` may change when this returns."""
        self.send_all(((ranks, number, values),), wire)

    def send_all(self, messages: Iterable[Message], wire: Wire) -> None:
        """Send several messages. Who does not take one yet, or never will, keeps none of the others waiting."""
        left: list[_Part] = []
        for ranks, number, values in messages:
            for segment, part in _segments(values):
                tag = number << SEGMENT_BITS | segment
                left += [(rank, tag, part) for rank in self._offer(ranks, tag, part, wire)]
        if left:
            self._insist(left, wire)

    def receive(self, rank: int, number: int, out: F32, wire: Wire) -> None:
        """Write the values of message `number` of `rank` to `out`."""
        self._take(rank, number, out, wire, add=False)

    def add(self, rank: int, number: int, total: F32, wire: Wire) -> None:
        """Add the values of message `number` of `rank` to `total`."""
        self._take(rank, number, total, wire, add=True)

    def sum(self, number: int, values: F32, total: F32, wire: Wire) -> None:
        """Write to `total` the sum in rank order of everyone's message `number`, of this member's the `values`.

        Only for what the mailbox reads (`Wire.native`).
        """
        for segment, part in _segments(total):
            first, tag = segment * SEGMENT_VALUES, number << SEGMENT_BITS | segment
            own, rank, waiting, deadline = values[first : first + part.size], 0, 0, 0.0
            while (rank := self._box.sum(rank, tag, wire.code, own, part)) < self.spec.size:
                deadline = self._extend(rank, deadline if rank == waiting else 0.0)
                waiting = rank
            self.stats.received_bytes += (HEADER_BYTES + wire.nbytes(part.size)) * (self.spec.size - 1)
        self.stats.dropped += self._box.take_dropped()

    def close(self) -> None:
        """Close the connections that this member made. What is on its way is delivered, unless a member was lost."""
        self._connections.close(linger=not self._failed)

    def _take(self, rank: int, number: int, out: F32, wire: Wire, add: bool) -> None:
        for segment, part in _segments(out):
            tag, size = number << SEGMENT_BITS | segment, wire.nbytes(part.size)
            if wire.native:
                self._await(rank, tag, wire, part.size, part, add, raw=False)
            else:
                raw = self._payload(size)
                self._await(rank, tag, wire, part.size, raw, add, raw=True)
                (wire.add if add else wire.decode)(raw, part)
            self.stats.received_bytes += HEADER_BYTES + size

    def _await(self, rank: int, tag: int, wire: Wire, count: int, out: F32 | Bytes, add: bool, raw: bool) -> None:
        """One segment of `count` values, waited for until the deadline."""
        deadline = 0.0  # not known before the first wait
        while not self._box.receive(rank, tag, wire.code, count, out, add, raw):
            deadline = self._extend(rank, deadline)
        self.stats.dropped += self._box.take_dropped()

    def _offer(self, ranks: Sequence[int], tag: int, part: F32, wire: Wire) -> Sequence[int]:
        """Send one segment to those of `ranks` that take it now; the others are returned."""
        size = wire.nbytes(part.size)
        if wire.native:
            left = self._box.send(ranks, tag, wire.code, part.size, part, raw=False)
        else:
            raw = self._payload(size)
            wire.encode(part, raw)
            left = self._box.send(ranks, tag, wire.code, part.size, raw, raw=True)
        self.stats.sent_bytes += (HEADER_BYTES + size) * (len(ranks) - len(left))
        return left

    def _insist(self, left: list[_Part], wire: Wire) -> None:
        """Go on offering what is left, taking in what the others send meanwhile: no two block each other."""
        deadline = 0.0
        while left:
            self._box.drain()
            before, left = left, self._offer_again(left, wire)
            if len(left) < len(before):
                deadline = 0.0
            else:
                deadline = self._extend(left[0][0], deadline)
                sleep(_REFUSED_S)

    def _offer_again(self, parts: list[_Part], wire: Wire) -> list[_Part]:
        """Those of `parts` that are not taken now either."""
        left: list[_Part] = []
        for rank, tag, part in parts:
            refused = any(rank == other for other, _, _ in left)
            if refused or self._offer((rank,), tag, part, wire):
                left.append((rank, tag, part))
        return left

    def _payload(self, size: int) -> Bytes:
        if self._raw.size < size:
            self._raw = np.empty(size, np.uint8)
        return self._raw[:size]

    def _extend(self, rank: int, deadline: float) -> float:
        """See `deadline.extend`."""
        try:
            return extend(self.spec, self._watch, rank, deadline)
        except BaseException:
            self._failed = True
            raise
