"""Connections of the server: their number, their time limits, and the choice of one to close if there are too many.

A connection is *silent* while the server waits for it: before its first request, within a header or a body, and between
two requests. A connection whose request is complete is not silent until it is answered. It is never closed to make
room.
"""

import asyncio
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from master.api.senders import network_of

MOST_CONNECTIONS = 2048
HEADER_S = 20.0
"""Seconds from a new connection, or from the first byte of a further request, to the end of the request's header."""
KEEP_ALIVE_S = 75.0
"""Seconds between two requests of a connection."""
STALLED_S = 30.0
"""Seconds after which a client is disconnected if it reads none of the data that was sent to it."""
DRAINED_S = 600.0
"""Seconds that a client has to take an answer after its end."""

MOST_CHUNKS = 4096
"""Limit of the chunks of one body, because a short chunk takes as long to read as kilobytes of a long one."""

_HEADER_BYTES = 64 << 10  # limit of one header, the same as uvicorn's
_SPARE_FILES = 64  # descriptors for everything but connections
_LEAST = 16


def most_connections() -> int:
    """Return the limit of connections: half of the free descriptors, because many may be accepted at once.

    Call this after all other files and sockets are open, because free descriptors are counted at the call.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    used = len(list(Path("/dev/fd").iterdir()))
    return max(_LEAST, min(MOST_CONNECTIONS, (soft - used - _SPARE_FILES) // 2))


class Connections:
    """All connections of one server. Call all methods on its event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts = Counter[str]()  # all connections, by network
        self._silent: dict[str, dict[HttpConnection, None]] = {}  # by network, those silent for the longest time first
        self._all: set[HttpConnection] = set()

    @property
    def protocol(self) -> "type[HttpConnection]":
        """A function that creates uvicorn's protocol for a connection and registers it in this object."""
        return type("HttpConnection", (HttpConnection,), {"registry": self})

    def arrived(self, one: "HttpConnection") -> bool:
        """Add a connection. If there are too many, close the one silent for the longest time in the largest network.

        A network may have up to three quarters of `most`. If it has more, one of its own connections is closed.

        Returns:
            False if there are too many and no suitable one is silent.
        """
        self._all.add(one)
        self._counts[one.network] += 1
        crowded: str | None = one.network
        if self._counts[one.network] <= self._most * 3 // 4:
            if len(self._all) <= self._most:
                return True
            crowded = max(self._silent, key=self._counts.__getitem__, default=None)
        if crowded not in self._silent:
            return False
        next(iter(self._silent[crowded])).drop()
        return True

    def left(self, one: "HttpConnection") -> None:
        """Remove a connection that has ended."""
        if one in self._all:
            self._all.remove(one)
            self._counts -= Counter([one.network])
            self.note(one, silent=False)

    def note(self, one: "HttpConnection", silent: bool) -> None:
        """Record whether a connection is silent. One that was already silent keeps its place in the order."""
        own = self._silent.setdefault(one.network, {})
        if silent:
            own.setdefault(one)
        else:
            own.pop(one, None)
        if not own:
            del self._silent[one.network]

    def sweep(self, now: float) -> None:
        """Close the connections that exceeded a time limit. `now` is the event loop's time in seconds."""
        for one in list(self._all):
            if one.is_late(now):
                one.drop()


class _BoundedParser(h11.Connection):
    """h11's parser, which refuses a body with more than `MOST_CHUNKS` chunks as invalid HTTP."""

    _chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError(f"a body has at most {MOST_CHUNKS} chunks")
        return event


class HttpConnection(H11Protocol):
    """uvicorn's connection, with time limits for incomplete headers and for answers that are not read."""

    registry: Connections

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _BoundedParser(h11.SERVER, _HEADER_BYTES)
        self.network = ""
        self._deadline: float | None = None  # for the header of the next request
        self._partial = False  # a part of that header has arrived
        self._drained: float | None = None  # deadline for the unsent data, set at the end of an answer
        self._unsent, self._moved = 0, 0.0  # bytes, and the time when they last became fewer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection; if there are too many, its request will be answered with 429."""
        super().connection_made(transport)
        self.network = network_of(self.client[0]) if self.client else ""
        self._deadline = self.loop.time() + HEADER_S
        if not self.registry.arrived(self):
            self.app_state = self.app_state | {"crowded": True}
        self.registry.note(self, silent=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove this connection from the list of open ones."""
        self.registry.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first ones of a request start the time limit of its header."""
        super().data_received(data)
        self._note()
        if self._idle and not self._partial:
            self._partial = True
            self._deadline = min(self._deadline or self.loop.time() + HEADER_S, self.loop.time() + HEADER_S)

    def send_400_response(self, msg: str) -> None:
        """Answer with status 400; if an answer has already begun, close the connection instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.drop()

    def on_response_complete(self) -> None:
        """Start the time limits for the next request and for reading this answer."""
        self._partial = False
        self._deadline, self._drained = self.loop.time() + KEEP_ALIVE_S, self.loop.time() + DRAINED_S
        super().on_response_complete()
        self._note()

    def is_late(self, now: float) -> bool:
        """Return True if the connection exceeded a time limit. `now` is the event loop's time in seconds."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent or not self._unsent:
            self._moved = now
        self._unsent = unsent
        if unsent:
            drained = self._idle and self._drained is not None and now > self._drained
            return drained or now - self._moved > STALLED_S
        return self._idle and self._deadline is not None and now > self._deadline

    def drop(self) -> None:
        """Close the connection at once, discarding unsent data."""
        self.connections.discard(self)
        self.registry.left(self)
        self.transport.abort()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _note(self) -> None:
        asking = not self._idle and self.cycle.more_body and not self.cycle.response_started
        if self.transport.is_closing():
            return
        self.registry.note(self, silent=self._idle or asking)
