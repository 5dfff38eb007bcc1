"""Control of SIGINT (Ctrl-C), SIGTERM and SIGHUP in code that must not be interrupted at any point."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_deferring = False  # a `deferred` block is active in the main thread


@contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT until the block ends. For code that must not stop halfway, or in which the exception would be lost.

    It takes about 20 us, and no time inside another such block. Python handles signals in its main thread only; in
    other threads this does nothing.
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
def record_interrupts(warning: bytes) -> Iterator[Callable[[], bool]]:
    """Record SIGINT within the block instead of raising. Yield a function that returns True once a SIGINT came.

    The second SIGINT writes `warning` to stderr, the third raises KeyboardInterrupt. In threads other than the main one
    this does nothing.
    """
    seen = 0

    def notice(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            with suppress(OSError):
                os.write(2, warning)  # not sys.stderr, which the signal may have interrupted in a write
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
def exit_on_termination() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP within the block into SystemExit, so that clean-up code runs.

    Code that has changed the terminal's settings may not get the exception in time. So the settings of stdin's terminal
    are restored at the end of the block.
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
    """Return the settings of the terminal that stdin is, or None if stdin is not a terminal."""
    if not os.isatty(0):
        return None
    import termios

    return termios.tcgetattr(0)


def _put_back(settings: list[Any]) -> None:
    import termios

    with suppress(termios.error, OSError):  # the terminal is gone
        if os.tcgetpgrp(0) != os.getpgrp():
            return  # another process has the terminal: a background process that sets it is stopped by the system
        termios.tcsetattr(0, termios.TCSANOW, settings)
