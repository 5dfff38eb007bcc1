"""Progress on stderr for phases that take more than a second; silent otherwise."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import monotonic
from typing import Protocol

_QUIET_SECONDS = 1.0
_BYTES = 10_000_000  # totals from here on are bytes, not steps
_shown = True  # for the whole process, like a log level
_begun = False  # an unfinished line of an answer is on the terminal


class Progress(Protocol):
    """Callback for the progress of a long phase: bytes (or steps) done so far, and in total."""

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` are done."""


Phase = Callable[[str], AbstractContextManager[Progress]]  # opens a phase by its title


def silent(done: int, total: int) -> None:
    """Do nothing: a `Progress` that reports nothing."""


def show(on: bool) -> None:
    """Set whether phases that begin from now on are shown. `--quiet` switches them off."""
    global _shown
    _shown = on


def line_begun(begun: bool) -> None:
    """Record whether the text last written to stdout's terminal left an unfinished line.

    Notes on stderr then end it first.
    """
    global _begun
    _begun = begun


def line_is_begun() -> bool:
    """Return True if stdout's terminal has an unfinished line."""
    return _begun


def warn(text: str) -> None:
    """Print a warning on stderr, also with `--quiet`. Ignore a closed stderr."""
    _say(f"tpi: {text}")


def note(text: str) -> None:
    """Print a note on stderr, unless `--quiet` is given."""
    if _shown:
        warn(text)


def _say(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{_line_end()}{line}\n")
        sys.stderr.flush()


def _line_end() -> str:
    """Return a line end if an answer on the same terminal has an unfinished line, or else an empty string."""
    begun = _begun and sys.stderr.isatty()
    line_begun(False)
    return "\n" if begun else ""


@contextmanager
def phase(title: str) -> Iterator[Progress]:
    """Report the progress of the block: a bar with bytes and the time left, shown once it has lasted a second.

    If stderr is not a terminal, print one line at the end instead.
    """
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
    """Return True if stderr can show a bar.

    Otherwise the library rich is not imported, because it takes megabytes of memory.
    """
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextmanager
def _bar(title: str, started: float) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    from tpi.console import SafeConsole

    class Bytes(DownloadColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if (task.total or 0) >= _BYTES else Text()

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Bytes(), TimeRemainingColumn())
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
