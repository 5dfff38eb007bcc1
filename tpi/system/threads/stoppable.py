"""Interruptible iteration over a slow source: the source is read on a thread, so that the caller can stop waiting."""

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.1  # interval between calls of `stopped`


def stoppable(read: Callable[[], Iterable[T]], give_up: Callable[[], None], stopped: Callable[[], bool]) -> Iterator[T]:
    """Yield the items of `read()` as they come, until `stopped()` returns True.

    `stopped` is called about ten times a second. `give_up` is always called at the end, and must end a read that still
    waits. Exceptions from `read` are raised here.
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
    except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
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
