"""Whether computing active neurons alone pays on this node: measured, not believed.

Two questions. How many may be active, before all of them are faster: from one block's weights, once at the start. And
with `--sparsity auto`, whether predicting and computing some takes less time than computing all: the first tokens are
computed by turns, one with all neurons and the next with those predicted, and what took less is gone on with.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Literal

import numpy as np

from tpi.devices.pages import Bytes
from tpi.kernels import Kernels
from tpi.kernels.spec import FfnSpec

TURNS = 8  # tokens of each kind that are compared
_WARM = 2  # tokens that come before
_REPEATED = 5
_UNMEASURED = 0.65  # share of the neurons, before a block was in memory to measure with (docs/sparsity.md)

Mode = Literal["auto", "static", "dynamic"]
Clock = Callable[[], float]


def measure_limit(kernels: Kernels, spec: FfnSpec, data: Bytes, clock: Clock = perf_counter) -> float:
    """Share of the neurons of a block from which on all of them are faster, for one token. By turns, the least counts.

    A sparse product's time grows with the neurons in it, so that one of half of them tells of all. A `clock` other than
    the real one is that of an emulation, in which a call takes as long every time.
    """
    neurons = spec.neuron.units * spec.neuron.width
    x = np.zeros((1, spec.neuron.hidden), np.float32)
    half = np.arange(0, neurons, 2, dtype=np.int32)
    both = (lambda: kernels.ffn(spec, data, x)), (lambda: kernels.ffn(spec, data, x, half))
    times = [[_timed(call, clock) for call in both] for _ in range(_REPEATED if clock is perf_counter else 1)]
    whole, some = (min(each) for each in zip(*times, strict=True))
    return min(1.0, float(whole) / (2 * max(float(some), 1e-9)))


def _timed(call: Callable[[], object], clock: Clock) -> float:
    began = clock()
    call()
    return clock() - began


class Judge:
    """What a node does in a step, and what became of it; by one thread."""

    def __init__(self, mode: Mode, limit: float | None = None) -> None:
        """`limit` is the share of active neurons above which all are computed; None: to be measured."""
        self.limit = _UNMEASURED if limit is None else limit
        self.measured = limit is not None
        self._mode = mode
        self._step = -1
        self._took: tuple[list[float], list[float]] = ([], [])  # seconds of steps of one token: all, and predicted ones
        self._now = [0.0, 0]  # of this step: seconds, and blocks that had one token
        self.pays: bool | None = None if mode == "auto" else True
        self.chosen = self.of = self.dense = 0  # neurons computed of so many; blocks that fell back to all
        self.predicting = self.seconds = 0.0  # of blocks whose neurons were predicted

    @property
    def predicts(self) -> bool:
        """Whether this step's neurons are predicted."""
        return self._step % 2 == 1 if self.pays is None else self.pays

    def measure(self, kernels: Kernels, spec: FfnSpec, data: Bytes) -> None:
        """Find out from which share on all neurons are faster, with a block whose weights are in memory; once."""
        if not self.measured:
            self.limit, self.measured = measure_limit(kernels, spec, data), True

    def begin(self) -> None:
        """A step begins."""
        seconds, blocks = self._now
        if self.pays is None and blocks and self._step >= _WARM:
            self._took[self.predicts].append(seconds)
            if min(map(len, self._took)) >= TURNS:
                self.pays = median(self._took[1]) < median(self._took[0])
        self._now = [0.0, 0]
        self._step += blocks > 0 or self._step < 0

    def note(self, seconds: float, tokens: int) -> None:
        """A block took so long, whatever was computed."""
        if tokens == 1:
            self._now[0] += seconds
            self._now[1] += 1

    def note_choice(self, chosen: int, of: int, predicting: float, seconds: float) -> None:
        """So many neurons of a block were computed; predicting them took so much of its time."""
        self.chosen += chosen
        self.of += of
        self.dense += chosen == of
        self.predicting += predicting
        self.seconds += seconds

    def describe(self) -> str:
        """What became of it, in a sentence; empty before anything was computed."""
        if self.pays is False:
            all_of_them, predicted = (1e3 * median(each) for each in self._took)
            return (
                f"sparsity is off, it does not pay here: a token's feed-forward blocks take {all_of_them:.2f} ms with "
                f"all neurons and {predicted:.2f} ms with the {self._share:.0%} that are predicted"
            )
        if not self.of:
            return ""
        kind = "trying sparsity, " if self.pays is None else ""
        return (
            f"{kind}{1 - self._share:.1%} of the neurons were skipped where they were predicted; predicting took "
            f"{self.predicting / max(self.seconds, 1e-9):.0%} of the feed-forward time"
        )

    @property
    def _share(self) -> float:
        return self.chosen / max(1, self.of)
