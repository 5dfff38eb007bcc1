"""Whether computing active neurons alone pays on this node: measured, not believed.

Two questions, for steps of each size. How many may be active, before all of them are faster: from one block's weights.
And with `--sparsity auto`, whether predicting and computing some takes less time than computing all: the first short
steps of a size are computed by turns, one with all neurons and the next with those predicted, and what took less is
gone on with. Longer steps are too few for turns: there the costs of blocks decide (`worker.neurons.union`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Literal

import numpy as np

from scheduler.neurons.sizes import size_class, size_name
from tpi.devices.pages import Bytes
from tpi.kernels import Kernels
from tpi.kernels.spec import STREAM_TOKENS, FfnSpec, Input
from worker.neurons.union import UnionCosts

TURNS = 8  # steps of each kind that are compared
SHORT = STREAM_TOKENS  # tokens of the longest steps that take turns: as many as kernels take at once
_WARM = 2  # steps that come before
_REPEATED = 5  # times that a short step's products are measured
_SEVERAL = 2  # and a longer one's
_UNMEASURED = 0.65  # share of the neurons, before a block was in memory to measure with (docs/sparsity.md)

Mode = Literal["auto", "static", "dynamic"]
Clock = Callable[[], float]


def measure_limit(
    kernels: Kernels, spec: FfnSpec, data: Bytes, clock: Clock = perf_counter, x: Input | None = None
) -> float:
    """Share of the neurons of a block from which on all of them are faster, for `x`, or one token. The least counts.

    A sparse product's time grows with the neurons in it, so that one of half of them tells of all. Both are timed by
    turns; a `clock` other than the real one is that of an emulation, in which a call takes as long every time.
    """
    neurons = spec.neuron.units * spec.neuron.width
    given = np.zeros((1, spec.neuron.hidden), np.float32) if x is None else x
    half = np.arange(0, neurons, 2, dtype=np.int32)
    both = (lambda: kernels.ffn(spec, data, given)), (lambda: kernels.ffn(spec, data, given, half))
    repeated = _REPEATED if given.shape[0] <= SHORT else _SEVERAL
    times = [[_timed(call, clock) for call in both] for _ in range(repeated if clock is perf_counter else 1)]
    whole, some = (min(each) for each in zip(*times, strict=True))
    return min(1.0, float(whole) / (2 * max(float(some), 1e-9)))


def _timed(call: Callable[[], object], clock: Clock) -> float:
    began = clock()
    call()
    return clock() - began


@dataclass
class SizeTurns:
    """Steps of one size, with all neurons and with those predicted by turns, until one takes less."""

    pays: bool | None = None  # None: not known yet
    chosen: int = 0  # neurons computed where they were predicted, of so many
    of: int = 0
    _took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # seconds a token: all, predicted
    _step: int = 0
    _now: float = 0.0  # seconds of this step's blocks, for each token
    _blocks: int = 0

    @property
    def predicts(self) -> bool:
        """Whether the next step's neurons are predicted."""
        return self._step % 2 == 1 if self.pays is None else self.pays

    @property
    def seconds(self) -> tuple[float, float]:
        """What a token's blocks took in the median step, with all neurons and with those predicted."""
        everything, predicted = (median(each) if each else 0.0 for each in self._took)
        return everything, predicted

    def note(self, seconds: float) -> None:
        """A block took so long for each token."""
        self._now += seconds
        self._blocks += 1

    def end(self) -> None:
        """The step is over, if there was one."""
        if self.pays is None and self._blocks:
            if self._step >= _WARM:
                self._took[self.predicts].append(self._now)
                if min(map(len, self._took)) >= TURNS:
                    self.pays = self.seconds[1] < self.seconds[0]
            self._step += 1
        self.abandon()

    def abandon(self) -> None:
        """The step broke off, and tells nothing."""
        self._now, self._blocks = 0.0, 0


class Judge:
    """What a node does in a step, and what became of it; by one thread."""

    def __init__(self, mode: Mode, limit: float | None = None) -> None:
        """`limit` is the share of active neurons above which all are computed; None: to be measured."""
        self.costs = UnionCosts(limit)
        self._mode = mode
        self._turns: dict[int, SizeTurns] = {}  # by size
        self.chosen = self.of = self.dense = 0  # neurons computed of so many; blocks that fell back to all
        self.predicting = self.seconds = 0.0  # of blocks whose neurons were predicted

    def predicts(self, tokens: int) -> bool:
        """Whether this step's neurons are predicted, which has so many tokens."""
        return not self._takes_turns(tokens) or self._turns_of(tokens).predicts

    def pays(self, tokens: int = 1) -> bool | None:
        """Whether predicting paid in steps of about so many tokens; None: not known yet."""
        return self._turns_of(tokens).pays if self._mode == "auto" else True

    def limit(self, tokens: int = 1) -> float:
        """The share of active neurons above which all are faster, in steps of about so many tokens."""
        found = self.costs.limit(tokens)
        return _UNMEASURED if found is None else found

    def measured(self, tokens: int = 1) -> bool:
        """Whether that is known."""
        return self.costs.limit(tokens) is not None

    def measure(self, kernels: Kernels, spec: FfnSpec, data: Bytes, x: Input | None = None) -> None:
        """Find it out with a block whose weights are in memory, for steps as long as `x` (or a token); once."""
        tokens = 1 if x is None else x.shape[0]
        if not self.measured(tokens):
            self.costs.learn(tokens, measure_limit(kernels, spec, data, perf_counter, x))

    def begin(self) -> None:
        """A step begins."""
        for turns in self._turns.values():
            turns.end()

    def abandon(self) -> None:
        """The step breaks off."""
        for turns in self._turns.values():
            turns.abandon()

    def note(self, seconds: float, tokens: int) -> None:
        """A block took so long, whatever was computed."""
        if self._takes_turns(tokens):
            self._turns_of(tokens).note(seconds / tokens)

    def note_choice(self, chosen: int, of: int, predicting: float, seconds: float, tokens: int = 1) -> None:
        """So many neurons of a block were computed; predicting them took so much of its time."""
        self.chosen += chosen
        self.of += of
        if self._takes_turns(tokens):
            turns = self._turns_of(tokens)
            turns.chosen, turns.of = turns.chosen + chosen, turns.of + of
        self.dense += chosen == of
        self.predicting += predicting
        self.seconds += seconds

    def describe(self) -> str:
        """What became of it, in a sentence; empty before anything was computed."""
        judged = {size: turns for size, turns in sorted(self._turns.items()) if turns.pays is not None}
        said = [_verdict(size, turns) for size, turns in judged.items()]
        if not judged or any(turns.pays for turns in judged.values()):
            said.insert(0, self.skipped(trying=self._mode == "auto" and not judged))
        return "; ".join(filter(None, said))

    def skipped(self, trying: bool) -> str:
        """What was left out so far, and what that took; empty before anything was computed."""
        if not self.of:
            return ""
        return (
            f"{'trying sparsity, ' if trying else ''}{1 - self.chosen / self.of:.1%} of the neurons were skipped where "
            f"they were predicted; predicting took {self.predicting / max(self.seconds, 1e-9):.0%} of the feed-forward "
            "time"
        )

    def _takes_turns(self, tokens: int) -> bool:
        return self._mode == "auto" and tokens <= SHORT

    def _turns_of(self, tokens: int) -> SizeTurns:
        return self._turns.setdefault(size_class(tokens), SizeTurns())


def _verdict(size: int, turns: SizeTurns) -> str:
    """What was measured of one size, and what followed."""
    everything, predicted = (1e3 * each for each in turns.seconds)
    of = f" in steps of {size_name(size)}" if size else ""
    return (
        f"sparsity is {'on' if turns.pays else 'off'}{of}, it {'pays' if turns.pays else 'does not pay'} here: a "
        f"token's feed-forward blocks take {everything:.2f} ms with all neurons and {predicted:.2f} ms with the "
        f"{turns.chosen / max(1, turns.of):.0%} that are predicted"
    )
