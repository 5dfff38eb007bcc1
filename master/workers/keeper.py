"""The thread that keeps connections alive while the master thinks, packs, loads, or waits for a person to type."""

from collections.abc import Callable
from threading import Event, RLock, Thread

_TURN_S = 0.25
_CLOSE_S = 0.01  # where an answer is timed


class Keeper:
    """Calls `tend` a few times a second, under a lock that whoever else uses the sockets holds meanwhile.

    It never waits for the lock: who holds it looks after the sockets itself. So the other thread pays for a lock that
    is nearly always free, and nothing is handed from thread to thread. Where an answer is timed it looks more often.
    """

    def __init__(self, tend: Callable[[], bool]) -> None:
        """`tend` says whether an answer is timed; what it raises ends the thread, and is kept as `problem`."""
        self.lock = RLock()
        self.problem: Exception | None = None
        self._tend = tend
        self._over = Event()
        self._thread = Thread(target=self._loop, name="keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end; does nothing the second time."""
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
                    import logging  # a fiftieth of a second that only this needs

                    logging.getLogger(__name__).exception("the keeper failed")
                    self.problem = error
                    return
                finally:
                    self.lock.release()
