"""Keys that are pressed while no prompt asks for them: they are not shown, and wait for the next prompt."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextmanager
def typing_kept(lines: bool = False) -> Iterator[None]:
    """Within the block, stdin's terminal shows nothing that is typed and keeps it for the program that reads next.

    Ctrl-C and the other keys of signals work. `lines`: the terminal goes on editing lines itself, for programs that
    read such; otherwise keys come as they are, and Ctrl-C does not throw away what was typed. Without a terminal, in
    the background, or outside of the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or not _in_foreground():
        yield
        return
    import termios

    before = termios.tcgetattr(0)
    _set(_quiet(before, lines))

    def again(number: int, frame: FrameType | None) -> None:
        """The shell has put its own settings back while this process was stopped."""
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
    """Return whether stdin is a terminal that this process may set: setting it from the background stops a process."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _quiet(settings: list[Any], lines: bool) -> list[Any]:
    import termios

    changed = list(settings)
    changed[3] &= ~termios.ECHO
    if not lines:
        changed[0] &= ~termios.ICRNL  # Enter is what it is at a prompt
        changed[3] = changed[3] & ~termios.ICANON | termios.NOFLSH
        changed[6] = list(changed[6])
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    return changed


def _set(settings: list[Any]) -> None:
    import termios

    with suppress(termios.error, OSError):  # it is gone
        termios.tcsetattr(0, termios.TCSANOW, settings)
