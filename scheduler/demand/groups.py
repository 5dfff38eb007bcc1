"""Units of a hold as they are used: one after the other, or as many together as there is room for."""

from collections.abc import Callable, Iterator

from scheduler.demand.policies import Units
from tpi.devices.pages import Bytes


class Groups(Iterator[list[Bytes]]):
    """The bytes of units in groups, in their order; each group is valid until the next is asked for.

    Where not all of them fit, one half of the cache is loaded while the other is used. Which units make a group does
    not depend on which were there, so that sums have the same bits again. `close` gives back what is held.
    """

    def __init__(
        self,
        units: Units,
        size: int,
        pin: Callable[[Units, int], int],
        wait: Callable[[int], Bytes],
        unpin: Callable[[Units], None],
    ) -> None:
        """`size` units make a group; `pin(units, at_least)` pins some of them from the first on, and says how many."""
        self._units, self._size, self._pin, self._wait, self._unpin = units, size, pin, wait, unpin
        self._used = self._given = self._pinned = 0  # units before these are given back, given out, pinned
        self._pin_more()

    def __next__(self) -> list[Bytes]:
        """The next group's, when all of it is there. Errors as `scheduler.demand.cache.DemandCache.groups`."""
        self._give_back(self._given)
        if self._given == len(self._units):
            raise StopIteration
        self._pin_more()
        begin, self._given = self._given, min(self._given + self._size, len(self._units))
        return [self._wait(int(unit)) for unit in self._units[begin : self._given]]

    def close(self) -> None:
        """Idempotent."""
        self._give_back(self._pinned)
        self._given = len(self._units)

    def _pin_more(self) -> None:
        """The next group has to be pinned as a whole, the one after it as far as there is room."""
        if self._pinned == len(self._units):
            return
        least = min(self._given + self._size, len(self._units)) - self._pinned
        ahead = min(self._given + 2 * self._size, len(self._units))
        self._pinned += self._pin(self._units[self._pinned : ahead], max(0, least))

    def _give_back(self, to: int) -> None:
        units, self._used = self._units[self._used : to], max(self._used, to)
        self._unpin(units)


class Walk(Iterator[Bytes]):
    """The bytes of units that are held in order, as many ahead as there is room for.

    Each is given back when the next is asked for, and the last ones by `close`.
    """

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
