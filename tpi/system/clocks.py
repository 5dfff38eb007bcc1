"""Clocks that take sleep into account, for waits between machines that may be suspended or stopped for hours."""

import time

PAUSE_S = 1.0  # a longer time between two calls of a clock that is read constantly: the process was stopped


def since_boot() -> float:
    """Return seconds since boot, including the time in which the machine was suspended.

    On systems that do not count the time of suspension, return `time.monotonic()`.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Awake:
    """A clock of the time in which its process was running: a pause between two calls counts as at most `PAUSE_S`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked = since_boot()

    def __call__(self) -> float:
        """Return the seconds since the clock was created, without pauses. Call it several times a second."""
        now = since_boot()
        self._seconds += min(now - self._looked, PAUSE_S)
        self._looked = now
        return self._seconds
