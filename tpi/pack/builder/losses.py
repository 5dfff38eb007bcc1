"""The error that re-quantising makes, summed over threads."""

import math
from collections import defaultdict
from threading import Lock

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


class Losses:
    """Squared errors and squares of the weights that went from one quantised coding to another."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._lock = Lock()

    def add(self, kind: tuple[str, str], before: F32, after: F32) -> None:
        """Count weights of coding `kind[0]` that were `before`, and are `after` in the pack format `kind[1]`."""
        error = float(np.square(before - after).sum(dtype=np.float64))
        power = float(np.square(before).sum(dtype=np.float64))
        with self._lock:
            sums = self._sums[kind]
            sums[0] += error
            sums[1] += power

    def report(self) -> str:
        """One line for people: relative RMS error by source coding; empty if nothing was re-quantised."""
        if not self._sums:
            return ""
        made = [
            f"{before} as {after}, relative RMS error {math.sqrt(error / power) if power else 0:.1%}"
            for (before, after), (error, power) in sorted(self._sums.items())
        ]
        return f"re-quantised: {'; '.join(made)}"
