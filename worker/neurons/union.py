"""The union of the active neurons of a step's tokens, and the measured costs that decide whether to predict it.

Kernels multiply a list of neurons with `PIECE` tokens at once, so each piece of a longer step has a list of its own.
Scores are computed for as many pieces at once as fit into `SCORED` bytes, at least one. Predicting stops as soon as
the lists are too long to pay; then all neurons are computed.

Costs are kept for each size of steps (`scheduler.neurons.sizes`). Neurons are predicted if that is faster than to
compute all neurons: the time to predict, plus the time to compute the share that the last prediction named.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median

import numpy as np
import numpy.typing as npt

from scheduler.neurons.sizes import size_class
from scheduler.slots.table import I32
from tpi.kernels.spec import STREAM_TOKENS
from worker.neurons.fallback import ASKED_AGAIN

F32 = npt.NDArray[np.float32]
Score = Callable[[F32], F32]
"""A function that returns scores `[tokens, neurons]` for an input `[tokens, hidden]`."""
PIECE = STREAM_TOKENS
SCORED = 256 << 10  # bytes of scores computed at once
_KEPT = 16  # latest measurements that count
_LEAST = 1 / 16  # least share of the neurons in a measurement: below it the overhead of the call dominates


@dataclass(frozen=True, eq=False)
class Union:
    """The neurons of a layer that a step needs.

    Attributes:
        active: the numbers of all neurons that any piece needs, int32 and ascending.
        scores: `[neurons]` if the step has one token, else None.
        pieces: the active neurons of each piece of a longer step; empty if there is one piece.
        neurons: number of neurons of the layer.
        share: share of the layer's neurons that a piece needs on average.
        tokens: number of tokens predicted.
        exceeded: True if predicting stopped because `share` was too large.
    """

    active: I32
    scores: F32 | None = None
    pieces: tuple[I32, ...] = ()
    neurons: int = 0
    share: float = 0.0
    tokens: int = 1
    exceeded: bool = False


def union_of(score: Score, threshold: float, x: F32, most: float = inf) -> Union:
    """Predict the neurons that the tokens of `x` `[tokens, hidden]` activate, and return their union.

    Args:
        score: the predictor.
        threshold: the score from which a neuron counts as active.
        x: the predictor's input.
        most: a share of the layer's neurons. Predicting stops as soon as a piece needs more than that on average.
    """
    if len(x) == 1:
        scores = score(x)[0]
        active = np.flatnonzero(scores >= np.float32(threshold)).astype(np.int32)
        return Union(active, scores, (), len(scores), len(active) / max(1, len(scores)))
    pieces: list[I32] = []
    due, at, rows, found, neurons, share = -(-len(x) // PIECE), 0, PIECE, 0, 1, 0.0
    while at < len(x) and share <= most:
        active = score(x[at : at + rows]) >= np.float32(threshold)
        for first in range(0, len(active), PIECE):
            pieces.append(np.flatnonzero(active[first : first + PIECE].any(axis=0)).astype(np.int32))
            found += len(pieces[-1])
        neurons, at = max(1, active.shape[1]), at + len(active)
        rows, share = max(1, SCORED // (4 * PIECE * neurons)) * PIECE, found / (due * neurons)
    several = tuple(pieces) if len(pieces) > 1 else ()
    every = np.unique(np.concatenate(pieces)) if several else pieces[0]
    return Union(every, None, several, neurons, share, at, share > most)


@dataclass
class _Size:
    """Measurements of steps of one size.

    `predicting` has the times of predictions, and `whole` those of computing all neurons, both in seconds per token and
    neuron of a layer.
    """

    limit: float | None = None
    predicting: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    shares: dict[int, float] = field(default_factory=dict)  # by layer, the share at the last prediction
    unasked: dict[int, int] = field(default_factory=dict)  # by layer, steps since that prediction


class UnionCosts:
    """Measured times of one node's blocks on the host, with all neurons and with predicted ones. Only one thread
    uses it.
    """

    def __init__(self, limit: float | None = None) -> None:
        """Create costs; `limit` is the share of active neurons above which all are computed, None to measure it."""
        self._given = limit
        self._sizes: dict[int, _Size] = {}

    def limit(self, tokens: int) -> float | None:
        """Return the share of active neurons above which steps of about `tokens` tokens compute all neurons.

        None if it was neither given nor measured yet.
        """
        return self._given if self._given is not None else self._of(tokens).limit

    def learn(self, tokens: int, limit: float) -> None:
        """Set the measured `limit` for steps of about `tokens` tokens."""
        self._of(tokens).limit = limit

    def should_predict(self, layer: int, tokens: int) -> bool:
        """Return True if a layer's neurons should be predicted in a step of `tokens` tokens.

        Return True if by the measured times the last prediction saved more time than it took, if it was more than
        `ASKED_AGAIN` steps ago, or if times are missing.
        """
        size, limit = self._of(tokens), self.limit(tokens)
        if layer not in size.shares or limit is None or not size.whole or not size.predicting:
            return True
        spent = median(size.predicting) / median(size.whole)
        if spent + size.shares[layer] / limit < 1:
            return True
        size.unasked[layer] = size.unasked.get(layer, 0) + 1
        if size.unasked[layer] <= ASKED_AGAIN:
            return False
        size.unasked[layer] = 0
        return True

    def record_prediction(self, layer: int, found: Union, tokens: int, seconds: float) -> None:
        """Record that predicting `found` for a layer, in a step of `tokens` tokens, took `seconds`."""
        size = self._of(tokens)
        size.shares[layer] = found.share
        size.predicting.append(seconds / max(1, found.tokens * found.neurons))

    def record_computation(self, tokens: int, neurons: int, share: float, seconds: float) -> None:
        """Record that computing a `share` of `neurons` neurons took `seconds`, without the time to predict them."""
        limit, each = self.limit(tokens), seconds / max(1, tokens * neurons)
        if share == 1:
            self._of(tokens).whole.append(each)
        elif limit is not None and share >= _LEAST:
            self._of(tokens).whole.append(each * limit / share)

    def _of(self, tokens: int) -> _Size:
        return self._sizes.setdefault(size_class(tokens), _Size())
