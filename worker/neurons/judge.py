"""Measurements that decide whether a node computes only predicted neurons, for steps of each size.

The limit is the share of active neurons above which computing all neurons is faster. It is measured with one block's
weights. With `--sparsity auto`, the first short steps of a size alternate between all neurons and predicted ones; the
node continues with the faster mode. Longer steps are too rare to alternate, so the costs of their blocks decide
(`worker.neurons.union`).
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

TURNS = 8  # steps of each mode that are compared
SHORT = STREAM_TOKENS  # most tokens of a step that alternates: as many as kernels compute at once
_WARM = 2  # steps before the compared ones
_REPEATED = 5  # measurements of a short step's products
_SEVERAL = 2  # measurements of a longer step's products
_UNMEASURED = 0.65  # assumed limit until a block is in memory to measure with

Mode = Literal["auto", "static", "dynamic"]
Clock = Callable[[], float]


def measure_limit(
    kernels: Kernels, spec: FfnSpec, data: Bytes, clock: Clock = perf_counter, x: Input | None = None
) -> float:
    """Return the share of active neurons, at most 1, above which computing all neurons of a block is faster.

    The input is `x`, or one token of zeros. A sparse product's time is proportional to its neurons. So the function
    alternately times a product of half the neurons and one of all, and compares the shortest times. With an
    emulation's `clock`, by which calls always take the same time, each product is timed once.
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
class StepComparison:
    """The comparison of steps of one size, which alternate between all neurons and the predicted neurons."""

    predicting_is_faster: bool | None = None  # True if predicting is faster; None until it is known
    chosen: int = 0  # neurons computed in steps that predicted
    of: int = 0  # neurons that those steps would have computed without predictions
    _took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # seconds a token: all, predicted
    _step: int = 0
    _now: float = 0.0  # seconds per token of this step's blocks so far
    _blocks: int = 0

    @property
    def predicts(self) -> bool:
        """True if the next step predicts its neurons."""
        return self._step % 2 == 1 if self.predicting_is_faster is None else self.predicting_is_faster

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds per token of the median step's blocks, with all neurons and with predicted ones."""
        everything, predicted = (median(each) if each else 0.0 for each in self._took)
        return everything, predicted

    def note(self, seconds: float) -> None:
        """Add `seconds`, the time per token of one block of the step."""
        self._now += seconds
        self._blocks += 1

    def end(self) -> None:
        """End the step, if one was measured, and decide once enough steps of each mode are known."""
        if self.predicting_is_faster is None and self._blocks:
            if self._step >= _WARM:
                self._took[self.predicts].append(self._now)
                if min(map(len, self._took)) >= TURNS:
                    self.predicting_is_faster = self.seconds[1] < self.seconds[0]
            self._step += 1
        self.abandon()

    def abandon(self) -> None:
        """Discard the measurements of the present step, because the step failed."""
        self._now, self._blocks = 0.0, 0


class SparsityJudge:
    """A judge that decides for each step whether a node computes only predicted neurons. Only one thread uses it."""

    def __init__(self, mode: Mode, limit: float | None = None) -> None:
        """Create a judge; `limit` is the share of active neurons above which all are computed, None to measure it."""
        self.costs = UnionCosts(limit)
        self._mode = mode
        self._turns: dict[int, StepComparison] = {}  # by size
        self.chosen = self.of = self.dense = 0  # neurons computed, all neurons, blocks that computed all neurons
        self.predicting = self.seconds = 0.0  # of blocks with predictions: time to predict, total time

    @property
    def compares(self) -> bool:
        """True if measured times decide whether neurons are predicted (`--sparsity auto`)."""
        return self._mode == "auto"

    def predicts(self, tokens: int) -> bool:
        """Return True if the current step, of `tokens` tokens, predicts its neurons."""
        return not self._takes_turns(tokens) or self._turns_of(tokens).predicts

    def predicting_is_faster(self, tokens: int = 1) -> bool | None:
        """Return True if steps of about `tokens` tokens are faster with predicted active neurons than with all neurons.

        Return None while too few steps were measured.
        """
        return self._turns_of(tokens).predicting_is_faster if self.compares else True

    def limit(self, tokens: int = 1) -> float:
        """Return the share of active neurons above which steps of about `tokens` tokens are faster with all neurons."""
        found = self.costs.limit(tokens)
        return _UNMEASURED if found is None else found

    def measured(self, tokens: int = 1) -> bool:
        """Return True if the limit for steps of about `tokens` tokens has been measured or given."""
        return self.costs.limit(tokens) is not None

    def measure(self, kernels: Kernels, spec: FfnSpec, data: Bytes, x: Input | None = None) -> None:
        """Measure the limit for steps with as many tokens as `x`, unless it is known already.

        Args:
            kernels: the kernels to time.
            spec: the block to measure with.
            data: the block's weights.
            x: the block's input; None: one token of zeros.
        """
        tokens = 1 if x is None else x.shape[0]
        if not self.measured(tokens):
            self.costs.learn(tokens, measure_limit(kernels, spec, data, perf_counter, x))

    def begin(self) -> None:
        """Begin a step, and end the measurement of the step before."""
        for turns in self._turns.values():
            turns.end()

    def abandon(self) -> None:
        """Discard the measurements of a step that was aborted."""
        for turns in self._turns.values():
            turns.abandon()

    def note(self, seconds: float, tokens: int) -> None:
        """Record the `seconds` of a block in a step of `tokens` tokens, in either mode."""
        if self._takes_turns(tokens):
            self._turns_of(tokens).note(seconds / tokens)

    def note_choice(self, chosen: int, of: int, predicting: float, seconds: float, tokens: int = 1) -> None:
        """Record how many neurons a block with a prediction computed, and how long it took.

        Args:
            chosen: the number of neurons that were computed.
            of: the number of neurons that could have been computed.
            predicting: the seconds of the prediction.
            seconds: the seconds of the prediction and the computation together.
            tokens: the number of tokens of the step.
        """
        self.chosen += chosen
        self.of += of
        if self._takes_turns(tokens):
            turns = self._turns_of(tokens)
            turns.chosen, turns.of = turns.chosen + chosen, turns.of + of
        self.dense += chosen == of
        self.predicting += predicting
        self.seconds += seconds

    def describe(self) -> str:
        """Return a sentence for the user on the decision, and on the share of neurons that was skipped.

        It is empty before any neurons were computed.
        """
        judged = {size: turns for size, turns in sorted(self._turns.items()) if turns.predicting_is_faster is not None}
        said = [_verdict(size, turns) for size, turns in judged.items()]
        if not judged or any(turns.predicting_is_faster for turns in judged.values()):
            said.insert(0, self.skipped(trying=self.compares and not judged))
        return "; ".join(filter(None, said))

    def skipped(self, trying: bool) -> str:
        """Return a sentence on the share of neurons skipped so far and the cost of predicting.

        It is empty before any neurons were computed. `trying` says that the comparison has not ended.
        """
        if not self.of:
            return ""
        return (
            f"{'trying sparsity, ' if trying else ''}{1 - self.chosen / self.of:.1%} of the neurons were skipped where "
            f"they were predicted; predicting took {self.predicting / max(self.seconds, 1e-9):.0%} of the feed-forward "
            "time"
        )

    def _takes_turns(self, tokens: int) -> bool:
        return self.compares and tokens <= SHORT

    def _turns_of(self, tokens: int) -> StepComparison:
        return self._turns.setdefault(size_class(tokens), StepComparison())


def _verdict(size: int, turns: StepComparison) -> str:
    """Return a sentence for the user with the decision for steps of one size, and the measured times."""
    everything, predicted = (1e3 * each for each in turns.seconds)
    of = f" in steps of {size_name(size)}" if size else ""
    on, pays = ("on", "pays") if turns.predicting_is_faster else ("off", "does not pay")
    return (
        f"sparsity is {on}{of}, it {pays} here: a "
        f"token's feed-forward blocks take {everything:.2f} ms with all neurons and {predicted:.2f} ms with the "
        f"{turns.chosen / max(1, turns.of):.0%} that are predicted"
    )
