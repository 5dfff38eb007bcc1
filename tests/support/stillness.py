"""Detection of a host that stood still: a live program then seems frozen or cut off."""

from threading import Event, Thread
from time import monotonic
from types import TracebackType

STILL_S = 0.25  # a tenth of the silence after which a node is taken for lost
_BEAT_S = 0.02


class Stillness:
    """A context in which a thread wakes fifty times a second; `longest` is its largest delay in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = Event()
        self._thread = Thread(target=self._beat)

    @property
    def excuses(self) -> bool:
        """True if the host stood still so long that other processes may have been silent for too long."""
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
