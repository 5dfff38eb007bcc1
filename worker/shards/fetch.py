"""Transfer of missing units from the master over the weights plane. Every unit is checked against its hash."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tpi.errors import WeightsError
from tpi.net.channel import Channel, UnreachableError
from tpi.net.fields import IN_FLIGHT_BYTES
from tpi.net.transfers import Missing, Need, Offer, Unavailable, UnitData
from worker.shards.partial_image import PartialImage

_SLICE_S = 0.1  # longest wait in seconds before `watch` is called again
_QUIET_S = 45.0  # seconds without an answer after which units are requested again; on a slow link one takes 8 s
_MOST_FLYING = 8  # limit of requests under way; below the high-water marks of the sockets
_TRIES = 3  # limit of damaged answers for one block

Done = Callable[[PartialImage], None]
Watch = Callable[[int], None]  # called with the bytes received so far


class Fetcher:
    """A worker's end of the weights plane, over which it requests missing units from the master.

    The master connects to the worker and sends an `Offer`; after a broken connection it connects and sends one again.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: set[bytes] = set()

    def fetch(
        self, master: bytes, announcement: Missing, partials: Sequence[PartialImage], done: Done, watch: Watch
    ) -> int:
        """Fetch all units that `partials` lack, and return the bytes received.

        Args:
            master: identity of the master's connection.
            announcement: tells the master how much will be requested.
            partials: the partial images to fill.
            done: called with each partial image when it has all its units.
            watch: called at least ten times a second with the bytes received; may raise to cancel.

        Raises:
            WeightsError: if the master cannot serve a block, or sends units that repeatedly do not match their hashes.
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
            if transfer.silent_s > _QUIET_S:
                transfer.restart()
        return transfer.received_bytes

    def tidy(self, master: bytes) -> None:
        """Read the messages that arrived while nothing was fetched, and drop them, except offers of connections.

        Unread messages would keep the memory of closed connections in use.
        """
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
    """The units that one plan still lacks, and the requests under way."""

    def __init__(self, partials: Sequence[PartialImage], done: Done) -> None:
        self.received_bytes = 0
        self._partials = {partial.block.id: partial for partial in partials}
        self._done = done
        self._waiting: deque[Need] = deque()
        self._flying: dict[Need, int] = {}
        self._damaged: dict[bytes, int] = {}
        self.restart()

    @property
    def complete(self) -> bool:
        """True if no units are missing."""
        return not self._waiting and not self._flying

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer or restart."""
        return time.monotonic() - self._heard

    def restart(self) -> None:
        """Queue all missing units again, since requests under way may be lost."""
        self._heard = time.monotonic()
        self._flying.clear()
        self._waiting = deque(need for partial in self._partials.values() for need in partial.needs())

    def next(self) -> Iterator[Need]:
        """Yield the requests to send now: as many as the limits on requests and bytes under way allow."""
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
        """Store the units of an answer. An answer without a request under way is dropped."""
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
        identity = partial.block.id
        self._damaged[identity] = self._damaged.get(identity, 0) + 1
        if self._damaged[identity] >= _TRIES:
            raise WeightsError(
                f"block {identity.hex()[:12]} arrived damaged {_TRIES} times; check the model pack on the master"
            )
        self._waiting.extend(partial.needs(units))
