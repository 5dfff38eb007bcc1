"""Progress on stderr for phases that take more than a second; silent otherwise."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import monotonic
from typing import Protocol

_QUIET_SECONDS = 1.0
_shown = True  # for the whole process, like the level of a log
_begun = False  # whether an answer has begun the terminal's line, and goes on


class Progress(Protocol):
    """What a long phase reports to: bytes (or steps) done so far out of a total."""

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` are done."""


Phase = Callable[[str], AbstractContextManager[Progress]]  # opens a phase by its title


def silent(done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def show(on: bool) -> None:
    """Whether phases that begin from now on are shown; `--quiet` switches them off."""
    global _shown
    _shown = on


def line_begun(begun: bool) -> None:
    """Whether what was just written to stdout's terminal has begun a line: what comes on stderr then gets another."""
    global _begun
    _begun = begun


def line_is_begun() -> bool:
    """Return whether stdout's terminal has a line that was begun and goes on."""
    return _begun


def warn(text: str) -> None:
    """Say on stderr what the user should know, quiet or not; a closed stderr is no error."""
    _say(f"tpi: {text}")


def note(text: str) -> None:
    """Say on stderr what may interest the user, unless `--quiet`."""
    if _shown:
        warn(text)


def _say(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{_line_end()}{line}\n")
        sys.stderr.flush()


def _line_end() -> str:
    """What ends a line that has been begun, where stderr is such a terminal, too."""
    begun = _begun and sys.stderr.isatty()
    line_begun(False)
    return "\n" if begun else ""


@contextmanager
def phase(title: str) -> Iterator[Progress]:
    """A bar with the time left, shown once the phase has lasted a second; on a plain file one line at its end."""
    if not _shown:
        yield silent
        return
    started = monotonic()
    try:
        with _bar(title, started) if _live() else nullcontext(silent) as report:
            yield report
    finally:
        if (took := monotonic() - started) > _QUIET_SECONDS:
            _say(f"{title}: {took:.1f} s")


def _live() -> bool:
    """Whether stderr shows what moves. Where it does not, rich is not loaded: it takes megabytes beside the weights."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextmanager
def _bar(title: str, started: float) -> Iterator[Progress]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from tpi.console import SafeConsole

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bars = Bars(*columns, console=SafeConsole(stderr=True), transient=True)
    task = bars.add_task(title, total=None)
    shown = False

    def report(done: int, total: int) -> None:
        nonlocal shown
        if not shown and monotonic() - started > _QUIET_SECONDS:
            shown = True
            sys.stderr.write(_line_end())
            bars.start()
        bars.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bars.stop()
