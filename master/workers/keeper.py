"""A thread that keeps connections alive while the master's main thread computes, packs, loads, or waits for input."""

from collections.abc import Callable
from threading import Event, RLock, Thread

_TURN_S = 0.25
_CLOSE_S = 0.01  # seconds between two calls of `tend` while a round trip is measured


class Keeper:
    """A thread that calls `tend` a few times a second, under a lock that every other user of the sockets must hold.

    The keeper never waits for the lock: the thread that holds it tends the sockets itself. Therefore other threads only
    pay for a lock that is nearly always free, and no work is handed between threads. The keeper
    calls more often while a round trip is measured.
    """

    def __init__(self, tend: Callable[[], bool]) -> None:
        """Create the thread.

        `tend` returns True while a round trip is measured. Its exception ends the thread and is stored in `problem`.
        """
        self.lock = RLock()
        self.problem: Exception | None = None
        self._tend = tend
        self._over = Event()
        self._thread = Thread(target=self._loop, name="keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end. Further calls do nothing."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        closely = False
        while not self._over.wait(_CLOSE_S if closely else _TURN_S):
            if self.lock.acquire(blocking=False):
                try:
                    closely = self._tend()
                except Exception as error:
                    import logging  # importing it takes 20 ms and is only needed after an error

                    logging.getLogger(__name__).exception("the keeper failed")
                    self.problem = error
                    return
                finally:
                    self.lock.release()
