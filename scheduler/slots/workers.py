"""The threads of a cache that fill its slots. A transfer queue has `scheduler.transfer.workers.QueueWorkers`."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.slots.shelf import Load
from scheduler.slots.wakeup import wake_soon

Serve = Callable[..., None]
"""Called as `serve(lane)`, or `serve()` for lane 0: runs the most urgent load of the lane, if any. It never raises."""


class LoadWorkers(Protocol):
    """Threads that fill the slots of a cache."""

    def start(self, serve: Serve) -> None:
        """Start the threads, which call `serve` for each load that is announced. Called once."""

    def kick(self, loads: Sequence[Load | None]) -> None:
        """Announce `loads`: a thread calls `serve` for each of them.

        For None, the cache chooses the load when `serve` runs.

        Raises:
            TpiError: if no thread will run the loads.
        """

    @property
    def lost(self) -> bool:
        """True if no thread will run the loads that were announced, because the threads have ended or failed."""

    def close(self) -> None:
        """Stop the threads and return when no load is running. Further calls do nothing."""


class Readers:
    """A `LoadWorkers` with threads of its own, which read from a disk."""

    lost = False

    def __init__(self, count: int) -> None:
        self._count = count
        self._work = threading.Semaphore(0)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self, serve: Serve) -> None:
        """Start the threads, which call `serve` for each load that is announced."""

        def run() -> None:
            wake_soon()  # the disk is idle from the end of a read until this thread starts the next
            while self._work.acquire() and not self._closed:
                serve()

        names = (f"tpi-reader-{number}" for number in range(self._count))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def kick(self, loads: Sequence[Load | None]) -> None:
        """Wake up a thread for each of `loads`."""
        if loads:
            self._work.release(len(loads))

    def close(self) -> None:
        """Stop the threads and join them. Further calls do nothing."""
        self._closed = True
        self._work.release(len(self._threads) or 1)
        for thread in self._threads:
            thread.join()
