"""A thread and a lock that all clients share: one call at a time, with the clients served in rotation."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from tpi.errors import BusyError

T = TypeVar("T")

MOST_WAITING = 256


class FairExecutor:
    """Runs functions on one thread. Call all methods on one event loop."""

    def __init__(self, name: str, most: int = MOST_WAITING) -> None:
        """Start a thread named `name`; at most `most` calls may wait for it."""
        self._thread = ThreadPoolExecutor(1, name)
        self._turns = FairLock(most)

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """Return the result of `function`, called on the thread. If cancelled before its turn, never call it.

        Raises:
            BusyError: if `most` calls already wait and this client has more waiting calls than any other.
        """
        async with self._turns.turn(client):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """Join the thread that calls run on."""
        self._thread.shutdown(cancel_futures=True)


class FairLock:
    """A lock for tasks of the event loop. If several clients wait for it, they get it in rotation."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._busy = False
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # the client whose turn is next comes first

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Hold the lock for the `with` block.

        Raises:
            BusyError: if too many calls wait, and this client has more of the waiting calls than any other.
        """
        if self._busy:
            await self._wait(client)
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        if sum(map(len, self._lines.values())) > self._most:
            self._turn_away()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            elif turn.exception() is None:  # the turn was given to this task at the same moment
                self._pass_on()
            raise

    def _leave(self, client: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(client, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._lines.pop(client, None)

    def _turn_away(self) -> None:
        latest = max(self._lines.values(), key=len).pop()
        if not latest.done():  # otherwise it was cancelled at this moment
            said = f"{self._most} requests are already waiting for their text to be prepared; try again later"
            latest.set_exception(BusyError(said))

    def _pass_on(self) -> None:
        self._busy = False
        while self._lines:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            while line and line[0].done():  # cancelled
                line.popleft()
            if not line:
                continue
            following = line.popleft()
            if line:
                self._lines[client] = line
            self._busy = True
            following.set_result(None)
            return
