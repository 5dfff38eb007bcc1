"""Units that are held one after the other, as many ahead as there is room for."""

from collections.abc import Callable, Iterator

from scheduler.demand.policies import Units
from tpi.devices.pages import Bytes


class Walk(Iterator[Bytes]):
    """The bytes of units in order: each is given back when the next is asked for, and the last ones by `close`."""

    def __init__(
        self,
        units: Units,
        pin: Callable[[Units, int], int],
        wait: Callable[[int], Bytes],
        unpin: Callable[[Units], None],
    ) -> None:
        """`pin(units, at_least)` pins some of them from the first on; returns how many."""
        self._units, self._pin, self._wait, self._unpin = units, pin, wait, unpin
        self._at = -1  # is used now
        self._pinned = pin(units, 1) if len(units) else 0

    def __next__(self) -> Bytes:
        """The next unit's, when it is there. Errors as `scheduler.demand.cache.DemandCache.follow`."""
        if self._at >= 0:
            self._unpin(self._units[self._at : self._at + 1])
        self._at = min(self._at + 1, len(self._units))
        if self._at == len(self._units):
            raise StopIteration
        if self._pinned < len(self._units):
            self._pinned += self._pin(self._units[self._pinned :], int(self._pinned == self._at))
        return self._wait(int(self._units[self._at]))

    def close(self) -> None:
        """Give back what is pinned. Idempotent."""
        rest, self._pinned = self._units[max(self._at, 0) : self._pinned], 0
        self._at = len(self._units)
        self._unpin(rest)
