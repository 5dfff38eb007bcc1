"""A thread that makes calls in order, in emulated time."""

from collections.abc import Callable
from typing import Generic, TypeVar

from tpi.devices.base import Finished, Pending
from tpi.devices.callqueue import CallQueue
from tpi.devices.emulated.clock import EmulatedClock

T = TypeVar("T")


class TimedThread:
    """A queue of calls (`tpi.devices.callqueue.CallQueue`) whose thread follows emulated time."""

    def __init__(self, name: str, clock: EmulatedClock) -> None:
        self._thread = CallQueue(name)
        self._clock = clock
        self._ended = 0.0  # the end of the call before

    def start(self, call: Callable[[], T]) -> "TimedStart[T]":
        """Append `call` to the queue and return it as a pending call; raise RuntimeError if the queue is closed."""
        asked = self._clock.now()

        def run() -> tuple[float, Finished[T]]:
            self._clock.sleep_until(max(asked, self._ended))
            result = Finished(call)
            self._ended = self._clock.now()
            return self._ended, result

        return TimedStart(self._thread.start(run), self._clock)

    def close(self) -> None:
        """Wait until all queued calls have ended, then end the thread. Further calls do nothing."""
        self._thread.close()


class TimedStart(Generic[T]):
    """A queued call that may still be running (`tpi.devices.base.Pending`)."""

    __slots__ = ("_clock", "_started")

    def __init__(self, started: Pending[tuple[float, Finished[T]]], clock: EmulatedClock) -> None:
        self._started = started
        self._clock = clock

    @property
    def done(self) -> bool:
        """True if `wait` would return at once."""
        return self._started.done

    def wait(self) -> T:
        """Return the call's result; advance the calling thread's emulated time to the call's end."""
        asked = self._clock.now()
        ended, result = self._started.wait()
        self._clock.sleep_until(max(asked, ended))
        return result.wait()
