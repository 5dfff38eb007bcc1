"""One answer under way, on the server's loop: what the engine's thread hands over is awaited here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from master.api.answers.backlog import Backlog
from master.api.answers.events import Ended, Event
from master.generation.thread import EngineThread, Ticket
from tpi.errors import TpiError


class Answering:
    """One answer under way. Iterate over it once; whoever stops early calls `cancel`."""

    def __init__(self, engine: EngineThread, echo: str = "") -> None:
        """`echo`: the text of the prompt, where the answer is to begin with it."""
        self.echo = echo
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog()
        self._ticket: Ticket | None = None
        self.prompt_tokens = 0

    def begin(self, ticket: Ticket) -> None:
        """Hand it in; raises BusyError."""
        self._engine.submit(ticket)
        self._ticket = ticket
        self.prompt_tokens = len(ticket.asked.tokens)

    def deliver(self, what: list[Event] | TpiError) -> None:
        """From the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._take, what)

    def cancel(self) -> None:
        """Give it up; does nothing where it is over."""
        if self._ticket is not None:
            self._engine.cancel(self._ticket)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Its events; the last one is `Ended`. Raises what went wrong."""
        while True:
            for event in await self._backlog.get():
                yield event
                if isinstance(event, Ended):
                    return

    def _take(self, what: list[Event] | TpiError) -> None:
        if not self._backlog.put(what):
            self.cancel()
