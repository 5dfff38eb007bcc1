"""How far a batch is: a bar where somebody looks, a line now and then where a file is written."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from tpi.progress import Progress, phase, silent, warn
from tpi.text import short_number

_EVERY_S = 30.0


class BatchLines:
    """A `tpi.progress.Progress` for logs: how many are answered, how fast, and how long the rest will take."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        """`clock` gives seconds."""
        self._say, self._clock = say, clock
        self._began: tuple[float, int] | None = None  # when, and with how many answered
        self._said = 0.0

    def __call__(self, done: int, total: int) -> None:
        """See `tpi.progress.Progress`."""
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
    """For people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def watching(title: str, quiet: bool) -> Iterator[Progress]:
    """Progress on stderr, with the time left."""
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        with phase(title) as bar:
            yield bar
    else:
        yield BatchLines(warn)
