"""A thread that makes calls one after the other: how a device computes, or copies, beside the host."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder:
    """Calls in the order in which they were given, by one thread that is joined when this is closed."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def start(self, call: Callable[[], T]) -> "Started[T]":
        """Have `call` made after those before it; RuntimeError once this is closed."""
        return Started(self._thread.submit(call))

    def close(self) -> None:
        """Wait for what was started, then end. Idempotent."""
        self._thread.shutdown()


class Started(Generic[T]):
    """A call that may still be going on. See `tpi.devices.base.Pending`."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """See `Pending.done`."""
        return self._future.done()

    def wait(self) -> T:
        """See `Pending.wait`."""
        return self._future.result()
