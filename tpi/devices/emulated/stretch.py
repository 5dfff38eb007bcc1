"""The factor that stretches emulated time, so that real computing never decides how long a task takes."""

from collections import defaultdict, deque
from math import frexp
from statistics import median
from threading import Lock

from tpi.errors import EmulationError
from tpi.text import short_number

HALF = 0.5  # share of its slot that a task's real work may take
_MARGIN = 2.0  # factor by which real work may be slower than during calibration
_SAMPLES = 64  # per kind of task; older ones are dropped


class StretchFactor:
    """One stretch factor for all emulated devices of a node. Several threads may use it at once."""

    def __init__(self, stretch: float | None = None) -> None:
        """Create the factor. If `stretch` is None, it is 1 until `calibrate` chooses it."""
        self.stretch = 1.0 if stretch is None else stretch
        self.settled = stretch is not None
        self.tasks = 0  # since calibration
        self.overruns = 0  # tasks whose real work took more than half of their slot
        self.worst = 0.0  # largest share of a slot that real work took
        self._lock = Lock()
        self._ratios: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=_SAMPLES))

    def note(self, what: str, real: float, modelled: float) -> None:
        """Record that a task called `what`, of `modelled` unstretched seconds, took `real` seconds of work."""
        ratio = real / modelled
        with self._lock:
            if self.settled:
                self.tasks += 1
                self.worst = max(self.worst, ratio / self.stretch)
                self.overruns += ratio > HALF * self.stretch
            else:
                self._ratios[what, frexp(modelled)[1]].append(ratio)

    def calibrate(self) -> float:
        """Choose the factor from the tasks noted so far, unless it was given, and return it.

        No task may be running. Tasks with the same name and durations within a factor of two are of one kind. The kind
        with the largest median decides, so that one interrupted task does not slow down everything.

        Raises:
            EmulationError: if no task was noted.
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
        """Raise an error if more than the share `allowed` of the tasks since calibration overran.

        Raises:
            EmulationError: if more tasks overran. The message says which setting would help.
        """
        with self._lock:
            if self.overruns > allowed * self.tasks:
                raise EmulationError(
                    f"{self.overruns} of {self.tasks} emulated tasks spent over half of their time on real work, "
                    f"so the timing of this run is not valid: give stretch={short_number(2 * self.stretch)}, "
                    "or stop other programs on this machine"
                )
