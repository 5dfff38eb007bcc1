"""A model with its neurons renumbered, before it is packed: gate and up by rows, down by columns, biases as they go."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tpi.errors import ModelError
from tpi.families.base import BlockRefs
from tpi.pack.builder.build import Opened
from tpi.sources.permuted import I32, Permutation, PermutedSource

_VECTORS = ("gate.bias", "up.bias")


def renumbered_model(opened: Opened, orders: Mapping[int, I32]) -> Opened:
    """`opened` with the neurons of each layer in `orders` in that order (`order[new] = old`).

    Predictors that the source has are of the old numbers, and are left out.

    Raises:
        ModelError: if an order is no permutation of the layer's neurons, or a tensor cannot be permuted: fused with
            another, or quantised along its neurons.
    """
    permutations: dict[str, Permutation] = {}
    for layer, order in orders.items():
        if sorted(order.tolist()) != list(range(opened.model.config.intermediate)):
            raise ModelError(f"an order of layer {layer} is no permutation of its neurons; profile the model again")
        for block in opened.model.layers[layer]:
            if block.kind == "ffn":
                permutations |= _of_block(block, order, opened.name)
    source = PermutedSource(opened.source, permutations)
    return replace(opened, model=replace(opened.model, predictors=()), source=source)


def _of_block(block: BlockRefs, order: I32, name: str) -> dict[str, Permutation]:
    found: dict[str, Permutation] = {}
    for part, ref in (*block.parts, *((part, ref) for part, ref in block.vectors if part in _VECTORS)):
        if ref.rows or ref.heads:
            raise ModelError(f"{name}: {ref.tensor} holds more than {part}, so its neurons cannot be renumbered")
        by_rows = ref.turned if part == "down" else part not in _VECTORS
        found[ref.tensor] = Permutation("row" if by_rows else "column", np.asarray(order, np.int32))
    return found
