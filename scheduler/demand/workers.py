"""Who loads units: threads of the cache's own, or those of a node's transfer queue."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from scheduler.window.wakeup import wake_soon

Serve = Callable[[], None]
"""Does one piece of work, whichever is the most urgent then, if there is any. Never raises."""


class LoadWorkers(Protocol):
    """Threads that serve a cache."""

    def start(self, serve: Serve) -> None:
        """Begin; called once."""

    def kick(self, count: int) -> None:
        """There may be so many more pieces of work.

        Raises:
            TpiError: if nobody will do them.
        """

    @property
    def lost(self) -> bool:
        """Whether work that was asked for will not be done."""

    def close(self) -> None:
        """Return when nothing is being done any more, and nothing will be. Idempotent."""


class Readers:
    """So many threads that do nothing else: for a disk."""

    lost = False

    def __init__(self, count: int) -> None:
        self._count = count
        self._work = threading.Semaphore(0)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self, serve: Serve) -> None:
        """See `LoadWorkers.start`."""

        def run() -> None:
            wake_soon()  # a disk is idle until whoever saw the end of a read asks for the next
            while self._work.acquire() and not self._closed:
                serve()

        names = (f"tpi-demand-{number}" for number in range(self._count))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def kick(self, count: int) -> None:
        """See `LoadWorkers.kick`."""
        if count:
            self._work.release(count)

    def close(self) -> None:
        """See `LoadWorkers.close`."""
        self._closed = True
        self._work.release(len(self._threads) or 1)
        for thread in self._threads:
            thread.join()


class Tickets:
    """The threads of a transfer queue: each piece of work is a transfer, which does what is most urgent at its turn."""

    def __init__(self, queue: TransferQueue, name: str) -> None:
        """`name` is what traces call the transfers. The queue is not closed here, and should be closed later."""
        self._queue, self._name = queue, name
        self._asked = deque[QueuedTransfer]()  # those that may not be over, in order

    def start(self, serve: Serve) -> None:
        """See `LoadWorkers.start`."""
        self._serve = serve

    def kick(self, count: int) -> None:
        """See `LoadWorkers.kick`."""
        while self._asked and self._asked[0].done and not self._asked[0].error:
            self._asked.popleft()
        for _ in range(count):
            self._asked.append(self._queue.submit("weight load", self._name, self._serve))

    @property
    def lost(self) -> bool:
        """See `LoadWorkers.lost`."""
        return bool(self._asked and self._asked[-1].done and self._asked[-1].error)  # a queue closes with all of them

    def close(self) -> None:
        """See `LoadWorkers.close`."""
        for ticket in self._asked:
            ticket.join()
