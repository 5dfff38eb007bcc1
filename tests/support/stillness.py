"""Whether this host stood still: then a program that is there is silent, as if it were frozen or cut off."""

from threading import Event, Thread
from time import monotonic
from types import TracebackType

STILL_S = 0.25  # a tenth of the silence after which a node is taken for lost
_BEAT_S = 0.02


class Stillness:
    """While it is entered, a thread wakes fifty times a second; `longest` is by how many seconds it was late."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = Event()
        self._thread = Thread(target=self._beat)

    @property
    def excuses(self) -> bool:
        """Whether the host stood still for so long that others may have been silent for too long."""
        return self.longest >= STILL_S

    def __enter__(self) -> "Stillness":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        before = monotonic()
        while not self._over.wait(_BEAT_S):
            now = monotonic()
            self.longest, before = max(self.longest, now - before - _BEAT_S), now
