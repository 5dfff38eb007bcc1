"""New numbers for a layer's neurons: dealt evenly to nodes, then hot first, and co-active ones beside each other.

An order is a permutation: `order[new] = old`, int32 `[neurons]`. Each node's neurons are a run of it, and a node's hot
ones the beginning of that run, so that hot sets are runs of units and stay contiguous on disk.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tpi.errors import PlanError
from tpi.sparsity.predictor import Predictor, PredictorMatrix
from tpi.sparsity.replay import FfnWeights
from tpi.sparsity.usage import F32, F64

I32 = npt.NDArray[np.int32]
WINDOW = 256  # neurons that are about as hot; within them those that come together stand together


def renumber(frequency: F64, together: F32, shares: Sequence[int]) -> I32:
    """The order of a layer's neurons for nodes that hold `shares` of them.

    Args:
        frequency: how often each neuron is active, `[neurons]`.
        together: how often two are, `[neurons, neurons]` (`NeuronUse.together`).
        shares: neurons of each node, in rank order; they add up to all of them.

    Raises:
        PlanError: if they do not.
    """
    if sum(shares) != len(frequency) or min(shares, default=-1) < 0:
        raise PlanError(f"shares of {list(shares)} neurons are not the {len(frequency)} of the layer")
    hot_first = np.argsort(-frequency, kind="stable").astype(np.int32)
    owners = _dealt(shares)
    runs = [hot_first[owners == node] for node in range(len(shares))]
    windows = [run[at : at + WINDOW] for run in runs for at in range(0, len(run), WINDOW)]
    return np.concatenate([_chained(window, frequency, together) for window in windows])


def inverse(order: I32) -> I32:
    """The new number of each old one."""
    found = np.empty_like(order)
    found[order] = np.arange(len(order), dtype=np.int32)
    return found


def renumbered(weights: FfnWeights, order: I32) -> FfnWeights:
    """The same network with its neurons in another order; it computes the same, but for the order of its sums."""
    spec = weights.spec
    turned = replace(spec, gate_bias=_turned(spec.gate_bias, order), up_bias=_turned(spec.up_bias, order))
    return FfnWeights(turned, _turned(weights.gate, order), weights.up[order], weights.down[order])


def renumbered_predictor(predictor: Predictor, order: I32) -> Predictor:
    """The same predictor for the neurons in another order."""
    second = PredictorMatrix(predictor.second.stored[order], predictor.second.columns)
    return replace(predictor, second=second, bias=_turned(predictor.bias, order))


def _turned(rows: F32 | None, order: I32) -> F32 | None:
    return None if rows is None else rows[order]


def _dealt(shares: Sequence[int]) -> I32:
    """The node of each neuron, the hottest first: after any number of them each node has its share, to within one.

    A node's `i`-th neuron is due at `(i + 1/2) / share` of the whole; they are dealt as they are due.
    """
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share])
    nodes = np.repeat(np.arange(len(shares), dtype=np.int32), shares)
    return nodes[np.argsort(due, kind="stable")]


def _chained(window: I32, frequency: F64, together: F32) -> I32:
    """The hottest first; then always the one that comes most often with the one before, by the smaller's own count."""
    pairs = together[np.ix_(window, window)].astype(np.float64)
    alone = np.maximum(np.diag(pairs), 1.0)
    alike = pairs / np.minimum(alone[:, None], alone[None])
    left = np.ones(len(window), bool)
    chain = [int(np.argmax(frequency[window]))]
    left[chain[0]] = False
    while left.any():
        chain.append(int(np.argmax(np.where(left, alike[chain[-1]], -1.0))))
        left[chain[-1]] = False
    return window[chain]
