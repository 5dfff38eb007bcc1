"""Renumbering of a layer's neurons: dealt evenly to the nodes, hot ones first, co-active ones next to each other.

An order is a permutation, `order[new] = old`, int32 `[neurons]`. Each node's neurons are one run of it. A node's hot
neurons come first in its run, so that they are contiguous on disk.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.errors import PlanError
from tpi.sparsity.predictor import Predictor, PredictorMatrix
from tpi.sparsity.usage import F32, F64, I64, Active, NeuronProfile
from tpi.system.arrays import read_arrays, save_arrays

NAME = "numbering.npz"  # in the directory of a renumbered pack
I32 = npt.NDArray[np.int32]
Bounds = tuple[int, int]
WINDOW = 256  # most neurons in a window: neurons about equally hot, which are ordered by co-activity
_MOST_BYTES = 1 << 28
_LEAST_WINDOW, _WINDOWS = 64, 8  # a small share has about 8 windows, so that its hot neurons still come first


def renumber(frequency: F64, active: Active, shares: Sequence[int]) -> I32:
    """Return the order of a layer's neurons for nodes that hold `shares` of them.

    Args:
        frequency: share of the tokens for which each neuron is active, `[neurons]`.
        active: active neurons of a sample of tokens, `[tokens, neurons]` (`NeuronProfile.active`).
        shares: number of neurons of each node, in rank order; their sum is the number of neurons.

    Raises:
        PlanError: if the shares do not add up to the number of neurons, or one is negative.
    """
    if sum(shares) != len(frequency) or min(shares, default=-1) < 0:
        raise PlanError(f"shares of {list(shares)} neurons do not add up to the layer's {len(frequency)}")
    hot_first = np.argsort(-frequency, kind="stable").astype(np.int32)
    owners = _dealt(shares)
    runs = [hot_first[owners == node] for node in range(len(shares))]
    windows = [part for run in runs for part in _windows(run)]
    return np.concatenate([_chained(part, frequency, active) for part in windows])


def window(share: int) -> int:
    """Return the number of neurons in a window, for a node that holds `share` neurons."""
    return min(WINDOW, max(_LEAST_WINDOW, share // _WINDOWS))


def inverse(order: I32) -> I32:
    """Return the inverse of the permutation `order`: the new number of each old neuron."""
    found = np.empty_like(order)
    found[order] = np.arange(len(order), dtype=np.int32)
    return found


def renumbered_predictor(predictor: Predictor, order: I32) -> Predictor:
    """Return the predictor of the same layer with its neurons in `order`."""
    second = PredictorMatrix(predictor.second.stored[order], predictor.second.columns)
    return replace(predictor, second=second, bias=_turned(predictor.bias, order))


def renumbered_profile(use: NeuronProfile, orders: Sequence[I32]) -> NeuronProfile:
    """Return the profile `use` with the neurons of each layer in the order that `orders` has for the layer.

    Only counts are kept, not the sample of tokens.
    """
    counts = np.stack([row[order] for row, order in zip(use.counts, orders, strict=True)])
    return replace(use, counts=counts, bits=use.bits[:, :0])


def runs_of_active(use: NeuronProfile, orders: Sequence[I32] | None = None) -> float:
    """Return the mean number of contiguous runs that a token's active neurons of a layer form.

    The mean is over the tokens of the sample and all layers, with the neurons of each layer renumbered by `orders`.
    """
    found = 0
    for layer in range(use.layers):
        active = use.active(layer)
        active = active if orders is None else active[:, orders[layer]]
        found += int((active[:, 1:] & ~active[:, :-1]).sum() + active[:, 0].sum())
    return float(found / max(1, use.layers * use.bits.shape[1]))


def load_imbalance(counts: I64, bounds: Sequence[Bounds]) -> float:
    """Return the load of the busiest node: its share of all activations divided by its share of the neurons.

    The result is 1 if all nodes have the same load. `counts` is `[layers, neurons]`; `bounds` are each node's neurons
    `[first, last)`.
    """
    total, neurons = max(1, int(counts.sum())), counts.shape[1]
    held = [(counts[:, first:last].sum() / total, (last - first) / neurons) for first, last in bounds if last > first]
    return max((float(active / part) for active, part in held), default=1.0)


def save_orders(path: Path, orders: Sequence[I32], of: str) -> None:
    """Write the orders of all layers, and `of`, which identifies the model and the profile.

    Raises:
        WeightsError: if the file cannot be written.
    """
    save_arrays(path, orders=np.stack(orders), of=of)


def load_orders(path: Path) -> tuple[I32, str]:
    """Return the orders int32 `[layers, neurons]` and the identification that `save_orders` wrote.

    Raises:
        ModelError: if the file is missing or damaged.
    """
    with read_arrays(path, _MOST_BYTES, "profile the model again") as file:
        orders, of = file["orders"], str(file["of"])
        if orders.dtype != np.int32 or orders.ndim != 2 or (np.sort(orders) != np.arange(orders.shape[1])).any():
            raise ValueError("its orders of neurons are not permutations")
    return orders, of


def _turned(rows: F32 | None, order: I32) -> F32 | None:
    return None if rows is None else rows[order]


def _windows(run: I32) -> list[I32]:
    size = window(len(run))
    return [run[at : at + size] for at in range(0, len(run), size)]


def _dealt(shares: Sequence[int]) -> I32:
    """Return the node that gets each neuron, `[neurons]`, from the most active neuron to the least active one.

    Among the first n neurons, for every n, each node has its share of n, rounded up or down. The `i`-th neuron of a
    node has the sort key `(i + 1/2) / share`, and the neurons are given out in the order of these keys.
    """
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share])
    nodes = np.repeat(np.arange(len(shares), dtype=np.int32), shares)
    return nodes[np.argsort(due, kind="stable")]


def _chained(numbers: I32, frequency: F64, active: Active) -> I32:
    """Return `numbers` as a chain: the hottest neuron first, then always the one most like its predecessor.

    Two neurons are alike if they are often active together: the count of that is divided by the smaller of their own
    counts.
    """
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
