"""Which loads of a demand cache go next: those that somebody waits for, then what is read ahead. Numbers only.

Read-ahead that is still going on when something is demanded makes it wait. So the gaps are measured, from the end of
one hold's loads to the next hold, and only what the usual gap has time for is read in it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

SAMPLES = 15  # gaps, of which the median counts
_JUDGED, _REMEMBERED, _RETRY = 16, 256, 16  # units: enough to judge by; kept in mind; of which one is tried
_FEWEST = 3  # before that many were seen, nothing is read ahead
_MOST_AHEAD = 64  # units that wait to be read ahead: those that come later are not kept in mind


class UnitLoad:
    """One unit on its way into its slot."""

    def __init__(self, unit: int, ahead: bool) -> None:
        self.unit = unit
        self.ahead = ahead
        self.error: Exception | None = None  # what it failed with; it is over then


class Waiting:
    """What is to be loaded and has not begun."""

    def __init__(self, joins: Callable[[int, int, int], bool], nbytes: Callable[[int], int]) -> None:
        """See `scheduler.demand.sources.UnitTier`."""
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

    def announce_first(self, units: list[int]) -> None:
        """These may be read ahead, before all others."""
        others = [unit for unit in self._ahead if unit not in units]
        self._ahead = deque([*units, *others][:_MOST_AHEAD])

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


class HintRecord:
    """Whether hints come true: what is read ahead takes the place of something, and is worth that only if it is used.

    Where fewer than a quarter were, one hint in `_RETRY` is followed, to see whether that goes on.
    """

    def __init__(self) -> None:
        self._used = self._wasted = self._asked = 0

    def note(self, used: int, wasted: int) -> None:
        """So many units that were read ahead were used, or went before they were."""
        self._used, self._wasted = self._used + used, self._wasted + wasted
        if self._used + self._wasted > _REMEMBERED:
            self._used, self._wasted = self._used // 2, self._wasted // 2

    def follows(self) -> bool:
        """Whether to read the next unit ahead; asked once for each."""
        judged = self._used + self._wasted
        if judged < _JUDGED or 4 * self._used >= judged:
            return True
        self._asked += 1
        return self._asked % _RETRY == 0


class IdleTime(Protocol):
    """When the tier below has time for what nobody waits for. The cache asks under its lock."""

    def asked(self, loads: bool) -> None:
        """A hold begins; whether something has to be loaded for it."""

    def loaded(self) -> None:
        """Everything that was demanded is there."""

    def room(self, speed: float, under_way: int) -> float:
        """Bytes that could be read ahead from now on, at `speed` bytes per second, beside those under way."""


class Patient:
    """An `IdleTime` of a tier whose loads nobody has to wait for: it is idle while nothing is demanded.

    Whoever finds a unit on its way does without it, if that is sooner, so read-ahead holds up nothing but the loads
    on demand behind it, by one unit.
    """

    def __init__(self) -> None:
        self._busy = False

    def asked(self, loads: bool) -> None:
        """See `IdleTime.asked`."""
        self._busy |= loads

    def loaded(self) -> None:
        """See `IdleTime.loaded`."""
        self._busy = False

    def room(self, speed: float, under_way: int) -> float:
        """See `IdleTime.room`."""
        return 0.0 if self._busy else inf


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
