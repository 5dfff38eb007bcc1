"""What was measured of neurons, and what a trace says of it: costs that drifted, thresholds that moved."""

from math import isfinite
from threading import Lock
from typing import Literal

from scheduler.neurons.costs import LineCost, NeuronCosts
from scheduler.neurons.sizes import size_class, size_name
from scheduler.neurons.thresholds import NeuronShares
from tpi.trace import OFF, NoTrace, clock

Side = Literal["accelerator", "CPU", "link"]
_STEP = 0.25  # of a score: smaller moves of a threshold are not told


class NeuronMeter:
    """Costs of one node's neurons, for steps of each size. May be used by several threads.

    `costs` are those of steps of one token, and of moves.
    """

    def __init__(self, trace: NoTrace = OFF) -> None:
        self.costs = NeuronCosts()
        self._sizes = {0: self.costs}
        self._trace, self._lock = trace, Lock()
        self._told: tuple[str, str] | None = None

    def lines(self, tokens: int = 1) -> tuple[LineCost, LineCost] | None:
        """Of the accelerator and of the CPU in steps of about so many tokens, when both are known."""
        costs = self._sizes.get(size_class(tokens))
        there, here = (None, None) if costs is None else (costs.there.line, costs.here.line)
        return None if there is None or here is None else (there, here)

    def took(self, side: Side, count: int, seconds: float, tokens: int = 1) -> None:
        """So many neurons took so long there, with so many tokens, or on the way there."""
        size = size_class(tokens)
        with self._lock:
            costs = self._sizes.setdefault(size, NeuronCosts())
            cost = {"accelerator": costs.there, "CPU": costs.here, "link": costs.moves}[side]
            before = cost.line
            if cost.note(count, seconds):
                of = f" with {size_name(size)}" if size else ""
                self._say(f"{side} drifted{of}: {_said(before)} before, {_said(cost.line)} now")

    def thresholds(self, shares: NeuronShares) -> None:
        """A token's, of one layer: told when they have moved."""
        now = _told(shares.threshold_there), _told(shares.threshold_here)
        if now != self._told:
            self._told = now
            self._say(f"thresholds: accelerator {now[0]}, CPU {now[1]}")

    def _say(self, what: str) -> None:
        now = clock()
        self._trace.add("compute", what, now, now)


def _said(line: LineCost | None) -> str:
    return "unknown" if line is None else f"{line.start * 1e6:.0f} us and {line.each * 1e6:.3f} us a neuron"


def _told(threshold: float) -> str:
    return f"{round(threshold / _STEP) * _STEP:.2f}" if isfinite(threshold) else "beyond all"
