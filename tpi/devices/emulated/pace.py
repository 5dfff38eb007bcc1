"""By how much emulated time is stretched, so that real computing never decides how long a task takes."""

from collections import defaultdict, deque
from math import frexp
from statistics import median
from threading import Lock

from tpi.errors import EmulationError
from tpi.text import short_number

HALF = 0.5  # of its slot is what a task's real work may take
_MARGIN = 2.0  # real work may become that much slower than it was while it was measured
_SAMPLES = 64  # the last of each kind are kept


class Pace:
    """One factor for all that is emulated in a node. May be used by several threads."""

    def __init__(self, stretch: float | None = None) -> None:
        """`stretch` is the factor; None: 1 until `calibrate` finds it."""
        self.stretch = 1.0 if stretch is None else stretch
        self.settled = stretch is not None
        self.tasks = 0  # since it is settled
        self.overruns = 0  # of them, whose real work took more than half of their slot
        self.worst = 0.0  # share of its slot that real work took
        self._lock = Lock()
        self._ratios: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=_SAMPLES))

    def note(self, what: str, real: float, modelled: float) -> None:
        """A task called `what`, of `modelled` seconds before they are stretched, took `real` ones of work."""
        ratio = real / modelled
        with self._lock:
            if self.settled:
                self.tasks += 1
                self.worst = max(self.worst, ratio / self.stretch)
                self.overruns += ratio > HALF * self.stretch
            else:
                self._ratios[what, frexp(modelled)[1]].append(ratio)

    def calibrate(self) -> float:
        """Settle the factor by what was noted so far, unless it was given; returns it. Nothing may be under way.

        Of tasks that are alike (one name, durations within a factor of two) the median counts, of the others the worst:
        one that was interrupted while it was measured does not slow down everything.

        Raises:
            EmulationError: if nothing has been noted.
        """
        with self._lock:
            if not self.settled:
                if not self._ratios:
                    raise EmulationError("nothing ran on the emulated devices yet: rehearse a step, or give stretch=")
                worst = max(median(ratios) for ratios in self._ratios.values())
                self.stretch, self.settled = max(1.0, _MARGIN / HALF * worst), True
                self._ratios.clear()
            return self.stretch

    def check(self, allowed: float = 0.0) -> None:
        """Reject what ran since the factor was settled, if more than the share `allowed` of its tasks overran.

        Raises:
            EmulationError: if they did; says what would help.
        """
        with self._lock:
            if self.overruns > allowed * self.tasks:
                raise EmulationError(
                    f"{self.overruns} of {self.tasks} emulated tasks took real work for more than half of their time, "
                    f"so this run says nothing of its schedule: give stretch={short_number(2 * self.stretch)}, "
                    "or have nothing else run on this machine"
                )
