"""A device whose calls and copies end, half by half, in an order that a seed draws, to test effects of timing."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from threading import Condition, Thread
from types import TracebackType
from typing import Any, TypeVar

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Pending
from tpi.devices.callqueue import QueuedCall
from tpi.devices.host import check_sizes
from tpi.devices.pages import Bytes, page_buffer
from tpi.kernels import Kernels

T = TypeVar("T")
Job = tuple["Future[Any]", Callable[[], Any]]


class Shuffled:
    """A `tpi.devices.base.Device`.

    Calls run in order, copies in any order; one thread does one piece of work at a time.

    `failing(n)` says whether the n-th copy fails.
    """

    name = "shuffled"

    def __init__(self, kernels: Kernels, seed: int, failing: Callable[[int], bool] = lambda _: False) -> None:
        self.kernels = kernels
        self.memory = Arena(self.name)
        self.copies = 0
        self._random, self._failing = Random(seed), failing
        self._calls = deque[Job]()
        self._moves: list[Job] = []  # halves: what is done next of each copy
        self._work = Condition()
        self._closed = False
        self._thread = Thread(target=self._serve, name="shuffled")
        self._thread.start()

    def __enter__(self) -> "Shuffled":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._thread.join()

    def staging(self, size: int) -> Bytes:
        return page_buffer(size)

    def start(self, call: Callable[[], T]) -> Pending[T]:
        return QueuedCall(self._give(self._calls, call))

    def copy(self, source: Bytes, target: Bytes) -> Event:
        check_sizes(source, target)
        self.copies += 1
        number, half = self.copies, source.size // 2

        def first() -> None:
            if self._failing(number):
                raise OSError(f"copy {number} failed")
            target[:half] = source[:half]

        def second() -> None:
            target[half:] = source[half:]

        future: Future[None] = Future()
        with self._work:
            self._moves.append((future, lambda: self._then(first, future, second)))
            self._work.notify_all()
        return QueuedCall(future)

    def _then(self, first: Callable[[], None], future: "Future[Any]", second: Callable[[], None]) -> None:
        """Do the `first` half now, and queue the `second` as another piece of work."""
        first()
        with self._work:
            self._moves.append((future, second))

    def _give(self, jobs: "deque[Job]", call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with self._work:
            jobs.append((future, call))
            self._work.notify_all()
        return future

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            future, call = job
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - it surfaces where the result is awaited
                future.set_exception(error)
                continue
            with self._work:
                half_done = any(other is future for other, _ in self._moves)
            if not half_done:
                future.set_result(result)

    def _next(self) -> Job | None:
        with self._work:
            while not (self._calls or self._moves):
                if self._closed:
                    return None
                self._work.wait()
            number = self._random.randrange(len(self._moves) + bool(self._calls))
            return self._moves.pop(number) if number < len(self._moves) else self._calls.popleft()
