"""Counts of a memory of slots, and the clock of its reads."""

import threading
import time
from dataclasses import dataclass, fields, replace
from typing import TypeVar

S = TypeVar("S", bound="LoadStats")


class ReadClock:
    """Clock of the seconds during which at least one read is in flight, in all memories that share it.

    Several threads may use it at once.
    """

    def __init__(self) -> None:
        self._flying = 0
        self._since = self._seconds = 0.0
        self._lock = threading.Lock()

    def begin_read(self) -> None:
        """Add a read that starts now to the reads in flight."""
        with self._lock:
            if not self._flying:
                self._since = time.perf_counter()
            self._flying += 1

    def end_read(self) -> None:
        """Remove a read that has ended from the reads in flight."""
        with self._lock:
            self._flying -= 1
            if not self._flying:
                self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Seconds with a read in flight, from the start until now."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._flying else 0.0)


@dataclass
class LoadStats:
    """Totals of a `scheduler.slots.cache.SlotCache`, which changes them under its lock."""

    hits: int = 0  # units that were loaded when a hold or a prediction wanted them
    misses: int = 0  # units that a hold or a prediction had to load, or that were loading
    read_bytes: int = 0  # bytes that were loaded, on demand and ahead
    stall_seconds: float = 0.0  # time that holds waited

    def copy(self: S) -> S:
        """Return a copy of the present counts."""
        return replace(self)

    def restore(self: S, counts: S) -> None:
        """Replace all counts by those of `counts`."""
        for field in fields(self):
            setattr(self, field.name, getattr(counts, field.name))
