"""Fetching missing units from the master over the weights plane: a few requests under way, every unit checked."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tpi.errors import WeightsError
from tpi.net.channel import Channel, UnreachableError
from tpi.net.fields import IN_FLIGHT_BYTES
from tpi.net.transfers import Missing, Need, Offer, Unavailable, UnitData
from worker.shards.partial_image import PartialImage

_SLICE_S = 0.1  # how often a wait looks up
_QUIET_S = 45.0  # without an answer before asking again; a slow link needs 8 s for one
_MOST_FLYING = 8  # requests under way, fewer than the sockets' high-water marks
_TRIES = 3  # for a block whose units arrive damaged

Done = Callable[[PartialImage], None]
Watch = Callable[[int], None]  # with the bytes received so far


class Fetcher:
    """The worker's end of the weights plane. A master's Offer opens it, again after each broken connection."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: set[bytes] = set()

    def fetch(
        self, master: bytes, announcement: Missing, partials: Sequence[PartialImage], done: Done, watch: Watch
    ) -> int:
        """Get everything that `partials` lack; `done` is called with each that is complete. Returns bytes received.

        `watch` is called ten times a second or more with the bytes received, and may raise to give up.

        Raises:
            WeightsError: if the master cannot serve a block, or sends what does not match its hash again and again.
        """
        transfer = Transfer(partials, done)
        announced = False
        self._drain(master, transfer)
        while not transfer.complete:
            watch(transfer.received_bytes)
            if master in self._open:
                try:
                    if not announced:
                        self._channel.send(announcement, master)
                        announced = True
                    for need in transfer.next():
                        self._channel.send(need, master)
                except UnreachableError:
                    self._open.discard(master)
            self._handle(master, transfer, self._channel.wait(_SLICE_S))
            self._drain(master, transfer)
            if transfer.quiet_s > _QUIET_S:
                transfer.restart()
        return transfer.received_bytes

    def tidy(self, master: bytes) -> None:
        """Take in what came while nothing was fetched: what stays unread keeps the memory of connections that ended."""
        while (received := self._channel.receive()) is not None:
            if isinstance(received[1], Offer):
                self._opened(received[0], master)

    def _opened(self, peer: bytes, master: bytes) -> None:
        self._open = (self._open & {master}) | {peer}

    def _drain(self, master: bytes, transfer: "Transfer") -> None:
        while (received := self._channel.receive()) is not None:
            self._handle(master, transfer, received)

    def _handle(self, master: bytes, transfer: "Transfer", received: tuple[bytes, object] | None) -> None:
        if received is None:
            return
        peer, message = received
        if isinstance(message, Offer):
            self._opened(peer, master)
            if peer == master:
                transfer.restart()
        elif peer == master and isinstance(message, UnitData):
            transfer.accept(message)
        elif peer == master and isinstance(message, Unavailable):
            raise WeightsError(f"the master cannot send block {message.block.hex()[:12]}: {message.reason}")


class Transfer:
    """What one plan still lacks, and what of it is under way."""

    def __init__(self, partials: Sequence[PartialImage], done: Done) -> None:
        self.received_bytes = 0
        self._partials = {partial.plan.block.id: partial for partial in partials}
        self._done = done
        self._waiting: deque[Need] = deque()
        self._flying: dict[Need, int] = {}
        self._damaged: dict[bytes, int] = {}
        self.restart()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing any more."""
        return not self._waiting and not self._flying

    @property
    def quiet_s(self) -> float:
        """Seconds since the last answer, or since the last start."""
        return time.monotonic() - self._heard

    def restart(self) -> None:
        """Forget what was asked for: it will not come."""
        self._heard = time.monotonic()
        self._flying.clear()
        self._waiting = deque(need for partial in self._partials.values() for need in partial.needs())

    def next(self) -> Iterator[Need]:
        """What to ask for now."""
        while self._waiting:
            need = self._waiting[0]
            size = self._partials[need.block].size_of(need)
            full = sum(self._flying.values()) + size > IN_FLIGHT_BYTES or len(self._flying) >= _MOST_FLYING
            if self._flying and full:
                return
            self._flying[need] = size
            self._waiting.popleft()
            yield need

    def accept(self, units: UnitData) -> None:
        """Take an answer; one that nobody asked for, or that came before the connection broke, is dropped."""
        need = Need(units.block, units.run, units.first, units.last)
        partial = self._partials.get(units.block)
        if partial is None or self._flying.pop(need, None) is None:
            return
        self._heard = time.monotonic()
        self.received_bytes += len(units.data)
        if partial.accept(units):
            self._retry(partial, units)
        if not partial.missing:
            self._done(self._partials.pop(units.block))

    def _retry(self, partial: PartialImage, units: UnitData) -> None:
        identity = partial.plan.block.id
        self._damaged[identity] = self._damaged.get(identity, 0) + 1
        if self._damaged[identity] >= _TRIES:
            raise WeightsError(f"block {identity.hex()[:12]} arrives damaged; check the model pack on the master")
        self._waiting.extend(partial.needs(units))
