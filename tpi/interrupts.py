"""Ctrl-C where it must not strike."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_deferring = False  # in the main thread


@contextmanager
def deferred() -> Iterator[None]:
    """SIGINT waits until the block is over. For code that must not end halfway, or where it would be printed, and lost.

    Takes some 20 us, and nothing inside another such block. Python handles signals in its main thread only; in others
    this does nothing.
    """
    global _deferring
    if threading.current_thread() is not threading.main_thread() or _deferring:
        yield
        return
    waiting: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))
    _deferring = True
    try:
        yield
    finally:
        _deferring = False
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)
