"""A thread that makes calls one after the other, so that a device computes or copies while the host goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class CallQueue:
    """A queue of calls that one thread makes in the order given; `close` joins the thread."""

    def __init__(self, name: str) -> None:
        """Create the queue; `name` is the name of its thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def start(self, call: Callable[[], T]) -> "QueuedCall[T]":
        """Append `call` to the queue and return it as a pending call; raise RuntimeError if the queue is closed."""
        return QueuedCall(self._thread.submit(call))

    def close(self) -> None:
        """Wait until all queued calls have ended, then end the thread. Further calls do nothing."""
        self._thread.shutdown()


class QueuedCall(Generic[T]):
    """A queued call that may still be running (`tpi.devices.base.Pending`)."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """True if `wait` would return at once."""
        return self._future.done()

    def wait(self) -> T:
        """Return the result of the call once it has ended, or raise the error that it raised."""
        return self._future.result()
