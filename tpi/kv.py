"""Paged storage of keys and values: one node's own heads, for every token of every sequence.

The master alone decides which page holds which tokens (`master.generation.pages`); tables are the same on every node,
so a node only owns the bytes.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import KV_GROUP, KV_RUN, PAGE_TOKENS, Batch

KvDtype = Literal["f32", "f16", "q8", "q4"]
KvArray = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]

KV_DTYPES: Final[tuple[KvDtype, ...]] = get_args(KvDtype)
_ELEMENTS: Final[dict[KvDtype, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "q8": np.dtype(np.int8),
    "q4": np.dtype(np.uint8),
}


def vector_bytes(head_dim: int, dtype: KvDtype) -> int:
    """Bytes of one key or value vector of one head."""
    groups = -(-head_dim // KV_GROUP)
    match dtype:
        case "q8":
            return head_dim + 2 * groups
        case "q4":
            return -(-head_dim // KV_RUN) * KV_RUN // 2 + 4 * groups
        case _:
            return head_dim * _ELEMENTS[dtype].itemsize


def kv_dtype_of(cache: KvArray) -> KvDtype | None:
    """The format of a cache, which the type of its elements says; None if it says none."""
    return next((dtype for dtype, element in _ELEMENTS.items() if element == cache.dtype), None)


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: KvDtype) -> int:
    """Bytes that one page (`PAGE_TOKENS` tokens, keys and values, all layers) takes on a node with `kv_heads`."""
    return 2 * layers * kv_heads * PAGE_TOKENS * vector_bytes(head_dim, dtype)


def pages_for(tokens: int) -> int:
    """pages that `tokens` tokens of one sequence take."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class KvPages:
    """The pages of some layers of one node.

    `keys[layer]` and `values[layer]` are `[blocks, kv_heads, PAGE_TOKENS, vector]`; the type of their elements says the
    format:

    - float32 and float16: a vector is the `head_dim` values;
    - int8, q8: `head_dim` codes, then for each group of 32 its scale, float16; a value is scale * code;
    - uint8, q4: 4-bit codes in runs of 16 values, 8 bytes each, value `i` of a run in the low half of byte `i`, value
      `i + 8` in its high half; then for each group of 32 its scale and its minimum, float16; a value is scale * code +
      minimum. Keys are spread before (`tpi.kernels.paged.spread`).

    Pages are zeroed by the operating system when first touched, so blocks that are never used cost nothing.
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
        """Storage for `blocks` pages of `kv_heads` local heads; `memory` gives zeroed bytes, so many or more."""
        element = _ELEMENTS[dtype]
        shape = (blocks, kv_heads, PAGE_TOKENS, vector_bytes(head_dim, dtype) // element.itemsize)

        def zeros() -> KvArray:
            if memory is None:
                return np.zeros(shape, element)
            nbytes = prod(shape) * element.itemsize
            return memory(nbytes)[:nbytes].view(element).reshape(shape)

        own = list(layers)
        return cls(blocks, {layer: zeros() for layer in own}, {layer: zeros() for layer in own})

    def hold(self, layer: int, batch: Batch) -> AbstractContextManager[tuple[KvArray, KvArray]]:
        """Keys and values of a layer, which are always here, for attention of `batch`."""
        return nullcontext((self.keys[layer], self.values[layer]))
