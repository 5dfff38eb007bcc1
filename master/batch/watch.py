"""Progress of a batch: a bar at a terminal, a line every 30 seconds otherwise."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from tpi.progress import Progress, phase, silent, warn
from tpi.text import short_number

_EVERY_S = 30.0


class BatchLines:
    """A `tpi.progress.Progress` that writes log lines: answered lines, lines per minute, and the time left."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        """Create a reporter that passes its lines to `say`; `clock` returns seconds."""
        self._say, self._clock = say, clock
        # time of the first report in seconds, and the number of lines answered by then
        self._began: tuple[float, int] | None = None
        self._said = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` lines are answered, at most once in 30 seconds."""
        now = self._clock()
        if self._began is None:
            self._began, self._said = (now, done), now
            if done:
                self._say(f"{done} of {total} are answered already")
        elif now - self._said >= _EVERY_S and done > self._began[1]:
            self._said = now
            rate = (done - self._began[1]) / (now - self._began[0])
            left = duration((total - done) / rate)
            self._say(f"{done} of {total} answered, {short_number(60 * rate)} a minute, about {left} left")


def duration(seconds: float) -> str:
    """Return a duration, given in seconds, as text in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def watching(title: str, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows progress and the time left on stderr; it shows nothing if `quiet`."""
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        with phase(title) as bar:
            yield bar
    else:
        yield BatchLines(warn)
