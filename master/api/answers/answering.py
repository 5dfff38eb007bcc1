"""One answer in progress on the server's event loop: it receives the events that the engine's thread delivers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from master.api.answers.backlog import Backlog
from master.api.answers.events import Ended, Event
from master.generation.thread import EngineThread, Ticket
from tpi.errors import TpiError


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
