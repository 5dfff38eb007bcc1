"""The emulated time of each thread, which is never ahead of real time.

A thread that sleeps until its task's end wakes up a little late. If its next task began when it woke, the delays of a
long run could add up to more than its tasks take. So a thread's emulated time is the end of its last task plus the
time that it has run since. Tasks in sequence take exactly the sum of their times. A task that was handed to a thread
begins no sooner than the emulated time of the thread that handed it over. Waiting for a task advances the waiting
thread to the task's end.
"""

import time
from collections.abc import Callable
from threading import local


class EmulatedClock:
    """A clock with an emulated time for each thread, in seconds. It is never ahead of the clock `real`."""

    def __init__(
        self, real: Callable[[], float] = time.perf_counter, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.real = real
        self._sleep = sleep
        self._threads = local()

    def now(self) -> float:
        """Return the calling thread's emulated time in seconds."""
        return self.real() - self._late

    def sleep_until(self, moment: float) -> None:
        """Sleep until `moment`, then set the calling thread's emulated time to it."""
        while (left := moment - self.real()) > 0:
            self._sleep(left)
        self._threads.late = self.real() - moment

    @property
    def _late(self) -> float:
        late: float = getattr(self._threads, "late", 0.0)
        return late
