"""The paged KV cache of one node: keys and values of its own heads, for every token of every sequence.

The master alone assigns pages to tokens (`master.deployment.pages`), and page tables are equal on every node. So a node
only stores the bytes.
"""

from collections.abc import Callable, Iterable, Mapping
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
    """Return the bytes of one key or value vector of one head."""
    groups = -(-head_dim // KV_GROUP)
    match dtype:
        case "q8":
            return head_dim + 2 * groups
        case "q4":
            return -(-head_dim // KV_RUN) * KV_RUN // 2 + 4 * groups
        case _:
            return head_dim * _ELEMENTS[dtype].itemsize


def kv_dtype_of(cache: KvArray) -> KvDtype | None:
    """Return the format of a KV cache array, which follows from its element type; None if there is no such format."""
    return next((dtype for dtype, element in _ELEMENTS.items() if element == cache.dtype), None)


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: KvDtype) -> int:
    """Return the bytes of one page (`PAGE_TOKENS` tokens, keys and values, all layers) on a node with `kv_heads`."""
    return 2 * layers * kv_heads * PAGE_TOKENS * vector_bytes(head_dim, dtype)


def pages_for(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens of one sequence take."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class KvPages:
    """The pages of some layers of one node; `count` is their number in each layer.

    `keys[layer]` and `values[layer]` are arrays `[count, kv_heads, PAGE_TOKENS, vector]`. Their element type tells the
    format:

    - float32 and float16: a vector is its `head_dim` values;
    - int8 (q8): `head_dim` codes, then the float16 scale of each group of 32; a value is scale * code;
    - uint8 (q4): 4-bit codes in runs of 16 values, 8 bytes each. Value `i` of a run is in the low half of byte `i`,
      value `i + 8` in its high half. Then come the float16 scale and minimum of each group of 32; a value is
      scale * code + minimum. Keys are transformed first (`tpi.kernels.paged.hadamard_rotate`).

    The operating system zeroes pages when they are first touched, so pages that are never used cost nothing.
    """

    count: int
    keys: dict[int, KvArray] = field(repr=False)
    values: dict[int, KvArray] = field(repr=False)

    @classmethod
    def allocate(
        cls,
        layers: Iterable[int],
        count: int,
        kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        memory: Callable[[int], Bytes] | None = None,
    ) -> "KvPages":
        """Return storage for `count` pages of `kv_heads` local heads.

        `memory(nbytes)` returns at least that many zeroed bytes; None allocates a numpy array.
        """
        return cls.of_layers(dict.fromkeys(layers, (kv_heads, head_dim)), count, dtype, memory)

    @classmethod
    def of_layers(
        cls,
        heads: Mapping[int, tuple[int, int]],
        count: int,
        dtype: KvDtype,
        memory: Callable[[int], Bytes] | None = None,
    ) -> "KvPages":
        """Return storage for `count` pages of each layer; `heads` has the KV heads and the head size of each layer.

        `memory` is that of `allocate`.
        """
        element = _ELEMENTS[dtype]

        def zeros(kv_heads: int, head_dim: int) -> KvArray:
            shape = (count, kv_heads, PAGE_TOKENS, vector_bytes(head_dim, dtype) // element.itemsize)
            if memory is None:
                return np.zeros(shape, element)
            nbytes = prod(shape) * element.itemsize
            return memory(nbytes)[:nbytes].view(element).reshape(shape)

        keys = {layer: zeros(*each) for layer, each in heads.items()}
        return cls(count, keys, {layer: zeros(*each) for layer, each in heads.items()})

    def hold(self, layer: int, batch: Batch) -> AbstractContextManager[tuple[KvArray, KvArray]]:
        """Return a context manager that yields a layer's keys and values for attention of `batch`.

        They are always in memory, so there is nothing to wait for.
        """
        return nullcontext((self.keys[layer], self.values[layer]))


LEAST_STATES: Final = 4
PAGES_PER_STATE: Final = 16


def states_for(pages: int) -> int:
    """Return the number of states that a node of a recurrent model allocates in addition to `pages` pages."""
    return LEAST_STATES + pages // PAGES_PER_STATE


@dataclass(frozen=True)
class States:
    """The states of the recurrent layers of one node: an array `[slots, values]` of each layer, float32.

    A slot holds one sequence's state after some token, and the inputs of up to `LATER` later tokens. As with pages, the
    master alone assigns slots (`master.deployment.states`). A step reads one slot of a sequence and may write another,
    so a slot that is kept for other sequences is never changed.
    """

    slots: int
    layers: dict[int, npt.NDArray[np.float32]] = field(repr=False)

    @classmethod
    def allocate(cls, sizes: Mapping[int, int], slots: int) -> "States":
        """Return zeroed storage for `slots` slots of each layer.

        `sizes` has the number of values of a state in each layer.
        """
        return cls(slots, {layer: np.zeros((slots, size), np.float32) for layer, size in sizes.items()})
