"""One answer in progress on the server's event loop: it receives the events that the engine's thread delivers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from master.api.answers.events import Ended, Event, TextPiece, TokenLogprob, ToolCall
from master.api.failures import RequestError
from master.generation.thread import EngineThread, Ticket
from tpi.errors import TpiError

MOST_UNREAD = 1 << 20
"""Approximate limit in bytes for one answer: thousands of tokens of text, or 250 with 20 log probabilities each."""

_EVENT, _BEST = 256, 192  # approximate bytes of an event without its text, and of one token of `best`


class Backlog:
    """Queue of events in the order in which they were generated. Call all methods on the server's event loop."""

    def __init__(self, most: int = MOST_UNREAD) -> None:
        self._queue: asyncio.Queue[list[Event] | TpiError] = asyncio.Queue()
        self._most, self._unread = most, 0
        self.overflowed = False

    def put(self, what: list[Event] | TpiError) -> bool:
        """Add events, or the error that ended the answer.

        Return False if the unread events take too much memory; `get` then raises RequestError.
        """
        if self.overflowed:
            return False
        self._unread += _size(what)
        self.overflowed = self._unread > self._most
        self._queue.put_nowait(_too_slow() if self.overflowed else what)
        return not self.overflowed

    async def get(self) -> list[Event]:
        """Wait for the next events and return them; raise TpiError if the answer failed."""
        got = await self._queue.get()
        if isinstance(got, TpiError):
            raise got
        self._unread -= _size(got)
        return got


def _size(what: list[Event] | TpiError) -> int:
    return sum(map(_event_size, what)) if isinstance(what, list) else 0


def _event_size(event: Event) -> int:
    if isinstance(event, ToolCall):
        return _EVENT + len(event.arguments)
    if isinstance(event, (TextPiece, Ended)):
        text = len(event.text) if isinstance(event, TextPiece) else 0
        return _EVENT + text + sum(map(_logprob_size, event.logprobs))
    return _EVENT + len(event.text)


def _logprob_size(token: TokenLogprob) -> int:
    return _EVENT + _BEST * len(token.best)


def _too_slow() -> TpiError:
    said = "too much of the answer has not been read; read faster, or ask for fewer tokens or logprobs"
    return RequestError(said, code="slow_client", status=408)


class PendingAnswer:
    """One answer in progress, as an async iterator of events. Iterate only once; `cancel` stops the answer early."""

    def __init__(self, engine: EngineThread, echo: str = "") -> None:
        """Create an answer; call this on the event loop.

        `echo` is the prompt's text if the answer must begin with it, else "".
        """
        self.echo = echo
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog()
        self._ticket: Ticket | None = None
        self.prompt_tokens = 0

    def begin(self, ticket: Ticket) -> None:
        """Submit the ticket to the engine; raise BusyError if too many requests wait."""
        self._engine.submit(ticket)
        self._ticket = ticket
        self.prompt_tokens = len(ticket.asked.tokens)

    def deliver(self, what: list[Event] | TpiError) -> None:
        """Hand events, or the error that ended the answer, to the event loop. Called on the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nothing awaits the answer any more
            self._loop.call_soon_threadsafe(self._take, what)

    def cancel(self) -> None:
        """Cancel the answer; do nothing if it has ended or was never submitted."""
        if self._ticket is not None:
            self._engine.cancel(self._ticket)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the answer's events, the last of which is `Ended`; raise TpiError if the answer failed."""
        while True:
            for event in await self._backlog.get():
                yield event
                if isinstance(event, Ended):
                    return

    def _take(self, what: list[Event] | TpiError) -> None:
        if not self._backlog.put(what):
            self.cancel()
