"""The threads that load units: a cache's own, or those of a node's transfer queue."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from scheduler.slots.wakeup import wake_soon
from scheduler.transfer.queue import QueuedTransfer, TransferQueue

Serve = Callable[[], None]
"""A function that runs the most urgent load, if there is one. It never raises."""


class LoadWorkers(Protocol):
    """Threads that serve a cache."""

    def start(self, serve: Serve) -> None:
        """Start the threads, which call `serve`. Called once."""

    def kick(self, count: int) -> None:
        """Announce up to `count` more loads.

        Raises:
            TpiError: if no thread will run them.
        """

    @property
    def lost(self) -> bool:
        """True if requested loads will not be run."""

    def close(self) -> None:
        """Stop the threads and return when no load is running. Idempotent."""


class Readers:
    """Threads of the cache's own, for a disk."""

    lost = False

    def __init__(self, count: int) -> None:
        self._count = count
        self._work = threading.Semaphore(0)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self, serve: Serve) -> None:
        """Start the threads, which call `serve`."""

        def run() -> None:
            wake_soon()  # the disk is idle from the end of a read until this thread starts the next
            while self._work.acquire() and not self._closed:
                serve()

        names = (f"tpi-demand-{number}" for number in range(self._count))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def kick(self, count: int) -> None:
        """Announce up to `count` more loads."""
        if count:
            self._work.release(count)

    def close(self) -> None:
        """Stop the threads and join them. Idempotent."""
        self._closed = True
        self._work.release(len(self._threads) or 1)
        for thread in self._threads:
            thread.join()


class Tickets:
    """The threads of a transfer queue. Each load is a transfer, which runs the load that is most urgent at its turn."""

    def __init__(self, queue: TransferQueue, name: str) -> None:
        """Use `queue`, which the caller closes after this; `name` is the name of the transfers in traces."""
        self._queue, self._name = queue, name
        self._asked = deque[QueuedTransfer]()  # transfers that may not have ended, in order

    def start(self, serve: Serve) -> None:
        """Remember `serve` for the transfers to come."""
        self._serve = serve

    def kick(self, count: int) -> None:
        """Submit `count` transfers; raise TpiError if the queue is closed."""
        while self._asked and self._asked[0].done and not self._asked[0].error:
            self._asked.popleft()
        for _ in range(count):
            self._asked.append(self._queue.submit("weight load", self._name, self._serve))

    @property
    def lost(self) -> bool:
        """True if the last transfer failed: a queue that closes fails all of its transfers."""
        return bool(self._asked and self._asked[-1].done and self._asked[-1].error)

    def close(self) -> None:
        """Wait for the submitted transfers to end. Idempotent."""
        for ticket in self._asked:
            ticket.join()
