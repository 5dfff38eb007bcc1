"""Loads of unequal numbers of parts in one cache, and loads that fail after their step was aborted."""

from collections.abc import Sequence
from contextlib import closing
from threading import Event
from typing import Any

import pytest

from scheduler.slots.cache import SlotCache, Source
from scheduler.slots.shelf import Load
from scheduler.slots.stats import LoadStats
from scheduler.slots.workers import Readers


class Ended:
    """A shelf that records the loads that end."""

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


class Late(Source):
    """A source that fails once a test says so."""

    def __init__(self) -> None:
        self.told = Event()

    def fill(self, loads: Sequence[Load], part: int) -> int:
        assert self.told.wait(60)
        raise OSError(f"unit {loads[0].units} failed")


@pytest.mark.parametrize("ahead", [True, False])
def test_an_aborted_step_fails_no_later_one(ahead: bool) -> None:
    source, shelf = Late(), Ended()
    with closing(SlotCache(source, Readers(1), LoadStats())) as cache:
        with cache.lock:
            cache.submit([Load(shelf, unit, unit) for unit in (1, 2)], ahead)  # one begins, the other is queued
        cache.abandon()
        source.told.set()
        cache.drain()
        cache.raise_failure()
        with cache.lock:
            cache.submit([Load(shelf, 3, 3)], ahead)
        cache.drain()
        with pytest.raises(OSError, match="unit 3 failed"):
            cache.raise_failure()
    assert shelf.units == [1, 2, 3]
