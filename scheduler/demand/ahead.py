"""How much may be read ahead: no more than the tier below has time for between what is demanded.

Read-ahead that is still going on when something is demanded makes it wait. So the gaps are measured, from the end of
one hold's loads to the next hold, and only what the usual gap has time for is read in it.
"""

from collections import deque
from collections.abc import Callable

SAMPLES = 15  # gaps, of which the median counts
_FEWEST = 3  # before that many were seen, nothing is read ahead


class Gaps:
    """The times between demands. Not safe from several threads: the cache asks under its lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._gaps = deque[float](maxlen=SAMPLES)
        self._since: float | None = None  # nothing has been demanded since then; None: something is being loaded

    def asked(self, loads: bool) -> None:
        """A hold begins; whether something has to be loaded for it."""
        now = self._clock()
        if self._since is not None:
            self._gaps.append(now - self._since)
        self._since = None if loads else now

    def loaded(self) -> None:
        """Everything that was demanded is there."""
        self._since = self._clock()

    @property
    def usual(self) -> float:
        """The median gap in seconds; 0 while too few were seen."""
        return sorted(self._gaps)[len(self._gaps) // 2] if len(self._gaps) >= _FEWEST else 0.0

    def room(self, speed: float, under_way: int) -> float:
        """Bytes that could be read ahead from now on, at `speed` bytes per second, beside those under way."""
        if self._since is None:
            return 0.0
        return (self.usual - (self._clock() - self._since)) * speed - under_way
