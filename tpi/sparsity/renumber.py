"""New numbers for a layer's neurons: dealt evenly to nodes, then hot first, and co-active ones beside each other.

An order is a permutation: `order[new] = old`, int32 `[neurons]`. Each node's neurons are a run of it, and a node's hot
ones the beginning of that run, so that hot sets are runs of units and stay contiguous on disk.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.errors import PlanError
from tpi.sparsity.predictor import Predictor, PredictorMatrix
from tpi.sparsity.usage import F32, F64, I64, Active, NeuronUse
from tpi.system.arrays import read_arrays, save_arrays

NAME = "numbering.npz"  # in the directory of a renumbered pack
I32 = npt.NDArray[np.int32]
Bounds = tuple[int, int]
WINDOW = 256  # neurons at most that are about as hot; within them those that come together stand together
_MOST_BYTES = 1 << 28
_LEAST_WINDOW, _WINDOWS = 64, 8  # of a small share there are about so many windows, that it stays hot first


def renumber(frequency: F64, active: Active, shares: Sequence[int]) -> I32:
    """The order of a layer's neurons for nodes that hold `shares` of them.

    Args:
        frequency: how often each neuron is active, `[neurons]`.
        active: of some tokens, which are: `[tokens, neurons]` (`NeuronUse.active`).
        shares: neurons of each node, in rank order; they add up to all of them.

    Raises:
        PlanError: if they do not.
    """
    if sum(shares) != len(frequency) or min(shares, default=-1) < 0:
        raise PlanError(f"shares of {list(shares)} neurons are not the {len(frequency)} of the layer")
    hot_first = np.argsort(-frequency, kind="stable").astype(np.int32)
    owners = _dealt(shares)
    runs = [hot_first[owners == node] for node in range(len(shares))]
    windows = [part for run in runs for part in _windows(run)]
    return np.concatenate([_chained(part, frequency, active) for part in windows])


def window(share: int) -> int:
    """How many neurons of a node's `share` are about as hot."""
    return min(WINDOW, max(_LEAST_WINDOW, share // _WINDOWS))


def inverse(order: I32) -> I32:
    """The new number of each old one."""
    found = np.empty_like(order)
    found[order] = np.arange(len(order), dtype=np.int32)
    return found


def renumbered_predictor(predictor: Predictor, order: I32) -> Predictor:
    """The same predictor for the neurons in another order."""
    second = PredictorMatrix(predictor.second.stored[order], predictor.second.columns)
    return replace(predictor, second=second, bias=_turned(predictor.bias, order))


def renumbered_use(use: NeuronUse, orders: Sequence[I32]) -> NeuronUse:
    """A profile with the neurons of each layer in its order; of counts alone, as what came together is not kept."""
    counts = np.stack([row[order] for row, order in zip(use.counts, orders, strict=True)])
    return replace(use, counts=counts, bits=use.bits[:, :0])


def runs_of_active(use: NeuronUse, orders: Sequence[I32] | None = None) -> float:
    """In how many runs side by side a token's active neurons of a layer lie, in the order of each layer; the mean over
    the sample's tokens and all layers."""
    found = 0
    for layer in range(use.layers):
        active = use.active(layer)
        active = active if orders is None else active[:, orders[layer]]
        found += int((active[:, 1:] & ~active[:, :-1]).sum() + active[:, 0].sum())
    return float(found / max(1, use.layers * use.bits.shape[1]))


def unevenness(counts: I64, bounds: Sequence[Bounds]) -> float:
    """How much more of what is active the busiest node has than its part of the neurons: 1, if all have the same.

    `counts` is `[layers, neurons]`; `bounds` are each node's neurons `[first, last)`.
    """
    total, neurons = max(1, int(counts.sum())), counts.shape[1]
    held = [(counts[:, first:last].sum() / total, (last - first) / neurons) for first, last in bounds if last > first]
    return max((float(active / part) for active, part in held), default=1.0)


def save_orders(path: Path, orders: Sequence[I32], of: str) -> None:
    """Write the orders of all layers, and what they are of. Raises WeightsError if they cannot be written."""
    save_arrays(path, orders=np.stack(orders), of=of)


def load_orders(path: Path) -> tuple[I32, str]:
    """What `save_orders` wrote: int32 `[layers, neurons]`, and what they are of.

    Raises:
        ModelError: naming the file, if it is missing or damaged.
    """
    with read_arrays(path, _MOST_BYTES, "profile the model again") as file:
        orders, of = file["orders"], str(file["of"])
        if orders.dtype != np.int32 or orders.ndim != 2 or (np.sort(orders) != np.arange(orders.shape[1])).any():
            raise ValueError("it has no orders of neurons")
    return orders, of


def _turned(rows: F32 | None, order: I32) -> F32 | None:
    return None if rows is None else rows[order]


def _windows(run: I32) -> list[I32]:
    size = window(len(run))
    return [run[at : at + size] for at in range(0, len(run), size)]


def _dealt(shares: Sequence[int]) -> I32:
    """The node of each neuron, the hottest first: after any number of them each node has its share, to within one.

    A node's `i`-th neuron is due at `(i + 1/2) / share` of the whole; they are dealt as they are due.
    """
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share])
    nodes = np.repeat(np.arange(len(shares), dtype=np.int32), shares)
    return nodes[np.argsort(due, kind="stable")]


def _chained(numbers: I32, frequency: F64, active: Active) -> I32:
    """The hottest first; then always the one that comes most often with the one before, by the smaller's own count."""
    seen = active[:, numbers].astype(np.float32)
    pairs = np.asarray(seen.T @ seen, np.float64)
    alone = np.maximum(np.diag(pairs), 1.0)
    alike = pairs / np.minimum(alone[:, None], alone[None])
    left = np.ones(len(numbers), bool)
    chain = [int(np.argmax(frequency[numbers]))]
    left[chain[0]] = False
    while left.any():
        chain.append(int(np.argmax(np.where(left, alike[chain[-1]], -1.0))))
        left[chain[-1]] = False
    return numbers[chain]
