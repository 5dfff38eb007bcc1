"""Reading that can be given up: what takes any time is read on a thread, and whoever waits for it may leave."""

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.1  # between two looks at whether somebody wants to leave


def stoppable(read: Callable[[], Iterable[T]], give_up: Callable[[], None], stopped: Callable[[], bool]) -> Iterator[T]:
    """What `read()` yields, as it comes, until `stopped`, which is asked again and again, says that it is enough.

    `give_up` is called at the end, whatever it is: it must end a read that still waits. What `read` raises is raised.
    """
    found: SimpleQueue[T | BaseException | None] = SimpleQueue()
    thread = Thread(target=lambda: _read(read, found), name="reader")
    thread.start()
    try:
        yield from _taken(found, stopped)
    finally:
        give_up()
        thread.join()


def _read(read: Callable[[], Iterable[T]], found: "SimpleQueue[T | BaseException | None]") -> None:
    try:
        for one in read():
            found.put(one)
    except BaseException as error:  # noqa: BLE001 - it is for who waits
        found.put(error)
    else:
        found.put(None)


def _taken(found: "SimpleQueue[T | BaseException | None]", stopped: Callable[[], bool]) -> Iterator[T]:
    while not stopped():
        try:
            one = found.get(timeout=_LOOK_S)
        except Empty:
            continue
        if one is None:
            return
        if isinstance(one, BaseException):
            raise one
        yield one
