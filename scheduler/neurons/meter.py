"""Measured costs of neurons. Costs that drift and thresholds that change are noted in the trace."""

from math import isfinite
from threading import Lock
from typing import Literal

from scheduler.neurons.costs import LineCost, NeuronCosts
from scheduler.neurons.sizes import size_class, size_name
from scheduler.neurons.thresholds import NeuronShares
from tpi.trace import OFF, NoTrace, clock

Side = Literal["accelerator", "CPU", "link"]
_STEP = 0.25  # resolution of thresholds in the trace, in units of a score


class NeuronMeter:
    """The measured costs of one node's neurons, one set for each class of step sizes.

    Several threads may use it at once.

    `costs` is the set of single-token steps; it also has the cost of moves.
    """

    def __init__(self, trace: NoTrace = OFF) -> None:
        self.costs = NeuronCosts()
        self._sizes = {0: self.costs}
        self._trace, self._lock = trace, Lock()
        self._told: tuple[str, str] | None = None

    def lines(self, tokens: int = 1) -> tuple[LineCost, LineCost] | None:
        """Return the accelerator's and the CPU's cost in steps of about `tokens` tokens; None until both are known."""
        costs = self._sizes.get(size_class(tokens))
        there, here = (None, None) if costs is None else (costs.accelerator.line, costs.cpu.line)
        return None if there is None or here is None else (there, here)

    def record(self, side: Side, count: int, seconds: float, tokens: int = 1) -> None:
        """Record that `side` computed or moved `count` neurons for `tokens` tokens in `seconds`."""
        size = size_class(tokens)
        with self._lock:
            costs = self._sizes.setdefault(size, NeuronCosts())
            cost = {"accelerator": costs.accelerator, "CPU": costs.cpu, "link": costs.moves}[side]
            before = cost.line
            if cost.add(count, seconds):
                of = f" with {size_name(size)}" if size else ""
                self._say(f"{side} drifted{of}: {_said(before)} before, {_said(cost.line)} now")

    def thresholds(self, shares: NeuronShares) -> None:
        """Write the two thresholds of `shares` to the trace if they differ from the last ones written.

        Thresholds are rounded to multiples of `_STEP`.
        """
        now = _told(shares.accelerator_threshold), _told(shares.cpu_threshold)
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
