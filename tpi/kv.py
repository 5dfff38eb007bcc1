"""Paged storage of keys and values: one node's own heads, for every token of every sequence.

The master alone decides which page holds which tokens (`master.generation.pages`); tables are the same on every node,
so a node only owns the bytes.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import KV_GROUP, PAGE_TOKENS, Batch

KvDtype = Literal["f32", "f16", "q8"]
KvArray = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]


def vector_bytes(head_dim: int, dtype: KvDtype) -> int:
    """Bytes of one key or value vector of one head."""
    if dtype == "q8":
        return head_dim + 2 * -(-head_dim // KV_GROUP)
    return head_dim * (4 if dtype == "f32" else 2)


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: KvDtype) -> int:
    """Bytes that one page (`PAGE_TOKENS` tokens, keys and values, all layers) takes on a node with `kv_heads`."""
    return 2 * layers * kv_heads * PAGE_TOKENS * vector_bytes(head_dim, dtype)


def pages_for(tokens: int) -> int:
    """pages that `tokens` tokens of one sequence take."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class KvPages:
    """The pages of some layers of one node.

    `keys[layer]` and `values[layer]` are `[blocks, kv_heads, PAGE_TOKENS, head_dim]` of float32 or float16, or uint8
    `[blocks, kv_heads, PAGE_TOKENS, vector_bytes]` for q8 (codes, then one f16 scale per 32). Pages are zeroed by the
    operating system when first touched, so blocks that are never used cost nothing.
    """

    blocks: int
    keys: dict[int, KvArray] = field(repr=False)
    values: dict[int, KvArray] = field(repr=False)

    @classmethod
    def allocate(
        cls,
        layers: Iterable[int],
        blocks: int,
        kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        memory: Callable[[int], Bytes] | None = None,
    ) -> "KvPages":
        """Storage for `blocks` pages of `kv_heads` local heads; `memory` gives so many zeroed bytes of a device."""
        width = vector_bytes(head_dim, dtype) if dtype == "q8" else head_dim
        element = {"f32": np.float32, "f16": np.float16, "q8": np.uint8}[dtype]
        shape = (blocks, kv_heads, PAGE_TOKENS, width)

        def zeros() -> KvArray:
            if memory is None:
                return np.zeros(shape, element)
            return memory(prod(shape) * np.dtype(element).itemsize).view(element).reshape(shape)

        own = list(layers)
        return cls(blocks, {layer: zeros() for layer in own}, {layer: zeros() for layer in own})

    def hold(self, layer: int, batch: Batch) -> AbstractContextManager[tuple[KvArray, KvArray]]:
        """Keys and values of a layer, which are always here, for attention of `batch`."""
        return nullcontext((self.keys[layer], self.values[layer]))
