"""Sums, over all threads, of the error that re-quantising weights causes."""

import math
from collections import defaultdict
from threading import Lock

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


class Losses:
    """Sums of squared errors and squared weights, for weights converted from one quantised format to another."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._lock = Lock()

    def add(self, kind: tuple[str, str], before: F32, after: F32) -> None:
        """Add weights that were converted from the source's format `kind[0]` to the pack's format `kind[1]`.

        `before` and `after` are their dequantised values.
        """
        error = float(np.square(before - after).sum(dtype=np.float64))
        power = float(np.square(before).sum(dtype=np.float64))
        with self._lock:
            sums = self._sums[kind]
            sums[0] += error
            sums[1] += power

    def report(self) -> str:
        """Return a line of text with the relative RMS error of each conversion; empty if there was none."""
        if not self._sums:
            return ""
        made = [
            f"{before} as {after}, relative RMS error {math.sqrt(error / power) if power else 0:.1%}"
            for (before, after), (error, power) in sorted(self._sums.items())
        ]
        return f"re-quantised: {'; '.join(made)}"
