"""Which loads of a demand cache go next: those that somebody waits for, then what is read ahead. Numbers only."""

from collections import deque
from collections.abc import Callable, Iterable


class Load:
    """One unit on its way into its slot."""

    def __init__(self, unit: int, ahead: bool) -> None:
        self.unit = unit
        self.ahead = ahead
        self.error: Exception | None = None  # what it failed with; it is over then


class Waiting:
    """What is to be loaded and has not begun."""

    def __init__(self, joins: Callable[[int, int, int], bool], nbytes: Callable[[int], int]) -> None:
        """See `scheduler.demand.sources.Source`."""
        self._joins, self._nbytes = joins, nbytes
        self._demanded = deque[int]()
        self._ahead = deque[int]()

    @property
    def ahead(self) -> int:
        """How many may be read ahead."""
        return len(self._ahead)

    def demand(self, units: Iterable[int]) -> None:
        """Somebody waits for these; what was to be read ahead is not read any more."""
        before = len(self._demanded)
        self._demanded.extend(units)
        if len(self._demanded) > before:
            self._ahead.clear()

    def announce(self, units: Iterable[int]) -> None:
        """These may be read ahead."""
        self._ahead.extend(unit for unit in units if unit not in self._ahead)

    def forget_ahead(self) -> None:
        """There is no time to read ahead."""
        self._ahead.clear()

    def next_demanded(self) -> list[int]:
        """The units of the next load on demand: one, or neighbours that are loaded as one."""
        return self._run(self._demanded)

    def next_ahead(self, there: Callable[[int], bool]) -> int | None:
        """The next unit to read ahead that is not `there`."""
        while self._ahead:
            unit = self._ahead.popleft()
            if not there(unit):
                return unit
        return None

    def _run(self, waiting: deque[int]) -> list[int]:
        if not waiting:
            return []
        run = [waiting.popleft()]
        together = self._nbytes(run[0])
        while waiting and self._joins(run[-1], waiting[0], together):
            together += self._nbytes(waiting[0])
            run.append(waiting.popleft())
        return run
