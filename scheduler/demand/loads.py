"""The decision which units a demand cache reads ahead, and when.

A load on demand must wait for a read-ahead that is still running. So units are read ahead only if that takes no longer
than the tier below is usually idle: from the end of one hold's loads to the next hold.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

SAMPLES = 15  # number of recent gaps whose median is used
_JUDGED = 16  # hints are judged once so many units that were read ahead have been used or evicted
_REMEMBERED = 256  # when so many units have been counted, their counts are halved, so that later ones weigh more
_RETRY = 16  # while most hints are wrong, one of so many is followed all the same
_FEWEST = 3  # gaps that must have been seen before anything is read ahead
_MOST_AHEAD = 64  # the most units in the queue after `add_first`; the last ones are dropped


class ReadAheadQueue:
    """A queue of the units that wait to be read ahead."""

    def __init__(self) -> None:
        self._units = deque[int]()

    def __len__(self) -> int:
        return len(self._units)

    def add(self, units: Iterable[int]) -> None:
        """Append the `units` that are not in the queue yet."""
        self._units.extend(unit for unit in units if unit not in self._units)

    def add_first(self, units: list[int]) -> None:
        """Put `units` in front of all others; if the queue becomes too long, drop its last units."""
        others = [unit for unit in self._units if unit not in units]
        self._units = deque([*units, *others][:_MOST_AHEAD])

    def clear(self) -> None:
        """Remove all units from the queue."""
        self._units.clear()

    def pop(self, has_slot: Callable[[int], bool]) -> int | None:
        """Remove the first queued unit that has no slot yet, by `has_slot(unit)`, and return it; None if there is none.

        Units before it, which have slots, are removed too.
        """
        while self._units:
            unit = self._units.popleft()
            if not has_slot(unit):
                return unit
        return None


class HintAccuracy:
    """A record of how many of the units that were read ahead were used.

    If fewer than two thirds were used, only one hint in `_RETRY` is followed, to see whether hints improve. So at most
    half as many bytes are read in vain as are read ahead and used, also where the tier below has time for more: in a
    group, while sums cross the network.
    """

    def __init__(self) -> None:
        self._used = self._wasted = self._asked = 0

    def add(self, used: int, wasted: int) -> None:
        """Count units that were read ahead: `used` were used, `wasted` were evicted before they were used."""
        self._used, self._wasted = self._used + used, self._wasted + wasted
        if self._used + self._wasted > _REMEMBERED:
            self._used, self._wasted = self._used // 2, self._wasted // 2

    def should_follow(self) -> bool:
        """Return True if the next unit should be read ahead. Call it once for each unit."""
        judged = self._used + self._wasted
        if judged < _JUDGED or 3 * self._used >= 2 * judged:
            return True
        self._asked += 1
        return self._asked % _RETRY == 0


class IdleTime(Protocol):
    """An estimate of how long the tier below stays idle. The cache calls its methods under the cache's lock."""

    def asked(self, loads: bool) -> None:
        """Record that a hold begins; `loads` is True if units must be loaded for it."""

    def loaded(self) -> None:
        """Record that all units that holds wait for are loaded."""

    def room(self, speed: float, under_way: int) -> float:
        """Return how many more bytes can be read ahead now.

        The tier reads `speed` bytes per second, and `under_way` bytes are being read ahead already.
        """


class IdleUnlessDemanded:
    """An `IdleTime` for a cache whose holds need not wait for loads (`DemandCache.share`).

    The tier below counts as idle while no demanded unit is loading. A hold can leave out a unit that is still being
    read ahead. So a read-ahead delays only the demand loads that are queued behind it, by the time of one unit.
    """

    def __init__(self) -> None:
        self._busy = False

    def asked(self, loads: bool) -> None:
        """Record that a hold begins; `loads` is True if units must be loaded for it."""
        self._busy |= loads

    def loaded(self) -> None:
        """Record that all units that holds wait for are loaded."""
        self._busy = False

    def room(self, speed: float, under_way: int) -> float:
        """Return 0 while a demanded unit is loading, else infinity."""
        return 0.0 if self._busy else inf


class IdleGaps:
    """An `IdleTime` from measured times between holds that load.

    It has no lock: the cache calls it under a lock of its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Measure gaps with `clock`, which returns seconds."""
        self._clock = clock
        self._gaps = deque[float](maxlen=SAMPLES)
        self._since: float | None = None  # when the current gap began; None while something is loading

    def asked(self, loads: bool) -> None:
        """Record that a hold begins; `loads` is True if units must be loaded for it."""
        now = self._clock()
        if self._since is not None:
            self._gaps.append(now - self._since)
        self._since = None if loads else now

    def loaded(self) -> None:
        """Record that all units that holds wait for are loaded."""
        self._since = self._clock()

    @property
    def usual(self) -> float:
        """Median seconds from the end of one hold's loads to the next hold.

        It is 0 while too few of these times were measured.
        """
        return sorted(self._gaps)[len(self._gaps) // 2] if len(self._gaps) >= _FEWEST else 0.0

    def room(self, speed: float, under_way: int) -> float:
        """Return how many more bytes can be read before the tier has been idle for as long as usual.

        The tier reads `speed` bytes per second, and `under_way` bytes are being read ahead already.
        """
        if self._since is None:
            return 0.0
        return (self.usual - (self._clock() - self._since)) * speed - under_way
