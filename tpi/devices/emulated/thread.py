"""A thread that makes calls in order, and stands in emulated time where they and who gave them say."""

from collections.abc import Callable
from typing import Generic, TypeVar

from tpi.devices.base import Finished, Pending
from tpi.devices.emulated.clock import EmulatedClock
from tpi.devices.inorder import InOrder

T = TypeVar("T")


class TimedThread:
    """See `tpi.devices.inorder.InOrder`."""

    def __init__(self, name: str, clock: EmulatedClock) -> None:
        self._thread = InOrder(name)
        self._clock = clock
        self._ended = 0.0  # the call before

    def start(self, call: Callable[[], T]) -> "TimedStart[T]":
        """Have `call` made after those before it; RuntimeError once this is closed."""
        asked = self._clock.now()

        def run() -> tuple[float, Finished[T]]:
            self._clock.be_at(max(asked, self._ended))
            result = Finished(call)
            self._ended = self._clock.now()
            return self._ended, result

        return TimedStart(self._thread.start(run), self._clock)

    def close(self) -> None:
        """Wait for what was started, then end. Idempotent."""
        self._thread.close()


class TimedStart(Generic[T]):
    """A call that may still be going on. See `tpi.devices.base.Pending`."""

    __slots__ = ("_clock", "_started")

    def __init__(self, started: Pending[tuple[float, Finished[T]]], clock: EmulatedClock) -> None:
        self._started = started
        self._clock = clock

    @property
    def done(self) -> bool:
        """See `Pending.done`."""
        return self._started.done

    def wait(self) -> T:
        """See `Pending.wait`; who waits is then no earlier than the call's end."""
        asked = self._clock.now()
        ended, result = self._started.wait()
        self._clock.be_at(max(asked, ended))
        return result.wait()
