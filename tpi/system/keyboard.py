"""Keys pressed while no prompt is shown: they are not echoed, and are kept for the next prompt."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextmanager
def echo_disabled(lines: bool = False) -> Iterator[None]:
    """Disable echo of stdin's terminal within the block, and keep typed keys for the program that reads next.

    Ctrl-C and other signal keys work. With `lines`, the terminal still edits lines, for programs that read whole lines.
    Otherwise keys are passed on unchanged, and Ctrl-C does not discard them. Without a terminal, in the background, or
    in threads other than the main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or not _in_foreground():
        yield
        return
    import termios

    before = termios.tcgetattr(0)
    _set(_quiet(before, lines))

    def again(number: int, frame: FrameType | None) -> None:
        """Disable echo again: the shell restored its own settings while this process was stopped."""
        if _in_foreground():
            _set(_quiet(before, lines))

    handler = signal.signal(signal.SIGCONT, again)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, handler)
        if _in_foreground():
            _set(before)


def _in_foreground() -> bool:
    """Return True if stdin is a terminal and this process is in its foreground.

    The system would stop a background process that changes the settings of the terminal.
    """
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _quiet(settings: list[Any], lines: bool) -> list[Any]:
    import termios

    changed = list(settings)
    changed[3] &= ~termios.ECHO
    if not lines:
        changed[0] &= ~termios.ICRNL  # Enter stays a carriage return, as at a prompt
        changed[3] = changed[3] & ~termios.ICANON | termios.NOFLSH
        changed[6] = list(changed[6])
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    return changed


def _set(settings: list[Any]) -> None:
    import termios

    with suppress(termios.error, OSError):  # the terminal is gone
        termios.tcsetattr(0, termios.TCSANOW, settings)
