"""Where each thread stands in emulated time, which real time is always somewhat ahead of.

A thread that slept until its task's end wakes up later than that, by as much as the system likes. Were its next task to
begin when it woke, delays would add up to more than the tasks of a long run take. So a thread stands where its last
task ended, plus the time that it has run since; tasks that follow each other take the sum of their times. A task that
a thread was given begins no sooner than the one who gave it stood; and who awaits a task is then no earlier than it.
"""

import time
from collections.abc import Callable
from threading import local


class EmulatedClock:
    """Seconds, by thread. Moments are real ones of `real`; a thread is at most as far as that."""

    def __init__(
        self, real: Callable[[], float] = time.perf_counter, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.real = real
        self._sleep = sleep
        self._threads = local()

    def now(self) -> float:
        """Where the calling thread stands."""
        return self.real() - self._late

    def be_at(self, moment: float) -> None:
        """Return when `moment` is over; the calling thread then stands there."""
        while (left := moment - self.real()) > 0:
            self._sleep(left)
        self._threads.late = self.real() - moment

    @property
    def _late(self) -> float:
        late: float = getattr(self._threads, "late", 0.0)
        return late
