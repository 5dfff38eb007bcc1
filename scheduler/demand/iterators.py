"""Iterators over the units of a hold: one after the other, or as many at once as there is room for."""

from collections.abc import Callable, Iterator

from scheduler.slots.table import Units
from tpi.devices.pages import Bytes


class GroupIterator(Iterator[list[Bytes]]):
    """The bytes of units in groups, in order; each group is valid until the next is requested.

    If not all units fit, one half of the cache is loaded while the other is used. The groups do not depend on which
    units were loaded before, so that repeated sums have the same bits. `close` releases held units.
    """

    def __init__(
        self,
        units: Units,
        size: int,
        pin: Callable[[Units, int], int],
        wait: Callable[[Units], list[Bytes]],
        unpin: Callable[[Units], None],
    ) -> None:
        """Iterate in groups of `size` units.

        `pin(units, at_least)` pins as many of `units` as fit, the first ones, and returns their number, which is not
        below `at_least`. `wait` returns the bytes of pinned units when they are loaded; `unpin` releases units.
        """
        self._units, self._size, self._pin, self._wait, self._unpin = units, size, pin, wait, unpin
        self._used = self._given = self._pinned = 0  # units before these positions are released, handed out, pinned
        self._pin_more()

    def __next__(self) -> list[Bytes]:
        """Release the last group, wait until the next is loaded, and return the bytes of its units.

        Errors are those of `scheduler.demand.cache.DemandCache.groups`.
        """
        self._give_back(self._given)
        if self._given == len(self._units):
            raise StopIteration
        self._pin_more()
        begin, self._given = self._given, min(self._given + self._size, len(self._units))
        return self._wait(self._units[begin : self._given])

    def close(self) -> None:
        """Release all units. Further calls do nothing."""
        self._give_back(self._pinned)
        self._given = len(self._units)

    def _pin_more(self) -> None:
        """Pin the rest of the next group, and as many units of the group after it as there is room for."""
        if self._pinned == len(self._units):
            return
        least = min(self._given + self._size, len(self._units)) - self._pinned
        ahead = min(self._given + 2 * self._size, len(self._units))
        self._pinned += self._pin(self._units[self._pinned : ahead], max(0, least))

    def _give_back(self, to: int) -> None:
        units, self._used = self._units[self._used : to], max(self._used, to)
        self._unpin(units)


class UnitIterator(Iterator[Bytes]):
    """The bytes of units in order, with as many units pinned ahead as there is room for.

    Each unit is released when the next is requested; `close` releases the others.
    """

    def __init__(
        self,
        units: Units,
        pin: Callable[[Units, int], int],
        wait: Callable[[Units], list[Bytes]],
        unpin: Callable[[Units], None],
    ) -> None:
        """Iterate over `units`.

        `pin(units, at_least)` pins as many of `units` as fit, the first ones, and returns their number, which is not
        below `at_least`. `wait` returns the bytes of pinned units when they are loaded; `unpin` releases units.
        """
        self._units, self._pin, self._wait, self._unpin = units, pin, wait, unpin
        self._at = -1  # position of the unit in use
        self._pinned = pin(units, 1) if len(units) else 0

    def __next__(self) -> Bytes:
        """Release the last unit, wait until the next one is loaded, and return the bytes of this next unit.

        Errors are those of `scheduler.demand.cache.DemandCache.follow`.
        """
        if self._at >= 0:
            self._unpin(self._units[self._at : self._at + 1])
        self._at = min(self._at + 1, len(self._units))
        if self._at == len(self._units):
            raise StopIteration
        if self._pinned < len(self._units):
            self._pinned += self._pin(self._units[self._pinned :], int(self._pinned == self._at))
        return self._wait(self._units[self._at : self._at + 1])[0]

    def close(self) -> None:
        """Release the pinned units. Further calls do nothing."""
        rest, self._pinned = self._units[max(self._at, 0) : self._pinned], 0
        self._at = len(self._units)
        self._unpin(rest)
