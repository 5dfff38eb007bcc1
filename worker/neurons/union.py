"""The neurons that a step's tokens need together, and whether they are worth predicting: by measured costs.

Kernels multiply a list of neurons with `PIECE` tokens at once. So do predictions: each piece of a longer step has a
list of its own, and scores take no more memory than `SCORED` bytes, or a piece's. As soon as the lists are longer than
would pay, all neurons are computed.

Whether to predict at all is asked of costs that are kept for each size of steps (`scheduler.neurons.sizes`): predicting
and then computing the share that was needed before is to take less than computing all.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median

import numpy as np
import numpy.typing as npt

from scheduler.neurons.sizes import size_class
from scheduler.neurons.slots import I32
from tpi.kernels.spec import STREAM_TOKENS
from worker.neurons.fallback import ASKED_AGAIN

F32 = npt.NDArray[np.float32]
Score = Callable[[F32], F32]
"""`[tokens, neurons]` of an input `[tokens, hidden]`."""
PIECE = STREAM_TOKENS
SCORED = 256 << 10  # bytes
_KEPT = 16  # measurements, the latest
_LEAST = 1 / 16  # share of the neurons that tells what one of them takes: of fewer, a call's own time is too much


@dataclass(frozen=True, eq=False)
class Union:
    """What a step needs: `active` in order, of one token also its `scores` `[neurons]`, of many the `pieces`' own.

    Attributes:
        neurons: of the layer.
        share: of them, that a piece needs on average.
        tokens: those that were asked about.
        over: whether the rest was not, as `share` was too large by then.
    """

    active: I32
    scores: F32 | None = None
    pieces: tuple[I32, ...] = ()
    neurons: int = 0
    share: float = 0.0
    tokens: int = 1
    over: bool = False


def union_of(score: Score, threshold: float, x: F32, most: float = inf) -> Union:
    """What `x` `[tokens, hidden]` needs, or that it is more than the share `most` of the neurons."""
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
    """What is known of steps of one size. Seconds are of one token and one of a layer's neurons."""

    limit: float | None = None
    predicting: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    shares: dict[int, float] = field(default_factory=dict)  # by layer, of its neurons, when last asked
    unasked: dict[int, int] = field(default_factory=dict)  # by layer, steps since then


class UnionCosts:
    """The costs of one node's blocks on the host; by one thread."""

    def __init__(self, limit: float | None = None) -> None:
        """`limit` is the share of active neurons above which all are computed, whatever the size; None: as measured."""
        self._given = limit
        self._sizes: dict[int, _Size] = {}

    def limit(self, tokens: int) -> float | None:
        """That share for steps of so many tokens; None: not measured yet."""
        return self._given if self._given is not None else self._of(tokens).limit

    def learn(self, tokens: int, limit: float) -> None:
        """It was measured."""
        self._of(tokens).limit = limit

    def asks(self, layer: int, tokens: int) -> bool:
        """Whether to predict a layer's neurons for so many tokens: where it paid the last time, or that is long ago."""
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

    def predicted(self, layer: int, found: Union, tokens: int, seconds: float) -> None:
        """That was named of a layer in a step of so many tokens, and asking took so long."""
        size = self._of(tokens)
        size.shares[layer] = found.share
        size.predicting.append(seconds / max(1, found.tokens * found.neurons))

    def computed(self, tokens: int, neurons: int, share: float, seconds: float) -> None:
        """That share of so many neurons took so long, without predicting them; 1: all were computed, by no list."""
        limit, each = self.limit(tokens), seconds / max(1, tokens * neurons)
        if share == 1:
            self._of(tokens).whole.append(each)
        elif limit is not None and share >= _LEAST:
            self._of(tokens).whole.append(each * limit / share)

    def _of(self, tokens: int) -> _Size:
        return self._sizes.setdefault(size_class(tokens), _Size())
