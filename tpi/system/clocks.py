"""Clocks that know of sleep: waits between machines of which any may be suspended, or stopped, for hours."""

import time

PAUSE_S = 1.0  # between two looks of somebody who looks all the time: more means that the process stood still


def since_boot() -> float:
    """Seconds that go on while the machine is suspended, where the system counts them; else as `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Awake:
    """A clock of the time in which its owner was there to look at it: a pause counts as `PAUSE_S` at most."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked = since_boot()

    def __call__(self) -> float:
        """Seconds. Call it several times a second."""
        now = since_boot()
        self._seconds += min(now - self._looked, PAUSE_S)
        self._looked = now
        return self._seconds
