"""Ctrl-C where it must not strike."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

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


@contextmanager
def noticed(warning: bytes) -> Iterator[Callable[[], bool]]:
    """The first SIGINT within the block is only noticed: what is yielded says whether there was one.

    The second one writes `warning` to stderr, the third is a KeyboardInterrupt. In other threads than the main one this
    does nothing, as `deferred`.
    """
    seen = 0

    def notice(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            with suppress(OSError):
                os.write(2, warning)  # sys.stderr may be in the middle of something
        elif seen > 2:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handler = signal.signal(signal.SIGINT, notice)
    try:
        yield lambda: seen > 0
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def ending() -> Iterator[None]:
    """SIGTERM and SIGHUP within the block leave as exceptions do, so that a terminal is as it was before.

    Code that has changed the terminal's settings may not get such an exception in time: stdin's are put back here.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    handlers = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = _terminal()
    try:
        yield
    finally:
        if before is not None:
            _put_back(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _terminal() -> list[Any] | None:
    """The settings of stdin's terminal, if it is one."""
    if not os.isatty(0):
        return None
    import termios

    return termios.tcgetattr(0)


def _put_back(settings: list[Any]) -> None:
    import termios

    with suppress(termios.error, OSError):  # it is gone
        if os.tcgetpgrp(0) != os.getpgrp():
            return  # another process has it by now: setting it from the background stops a process
        termios.tcsetattr(0, termios.TCSANOW, settings)
