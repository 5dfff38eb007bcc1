"""Loads of unequal numbers of parts in one cache."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from scheduler.slots.cache import SlotCache, Source
from scheduler.slots.shelf import Load
from scheduler.slots.stats import LoadStats
from scheduler.slots.workers import Readers


class Ended:
    """A shelf that takes note of the loads that end."""

    def __init__(self) -> None:
        self.units: list[Any] = []

    def end(self, load: Load, error: Exception | None) -> None:
        self.units.append(load.units)


class Nothing(Source):
    """A source that moves no bytes."""

    def fill(self, loads: Sequence[Load], part: int) -> int:
        return 0


def test_each_part_of_each_load_is_filled() -> None:
    """The first of the loads has the fewest parts, so that no thread is left over for the others."""
    shelf = Ended()
    with closing(SlotCache(Nothing(), Readers(1), LoadStats())) as cache:
        with cache.lock:
            cache.submit([Load(shelf, parts, parts, parts=parts) for parts in (1, 2, 5)])
        cache.drain()
    assert sorted(shelf.units) == [1, 2, 5]
