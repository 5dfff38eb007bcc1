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

from tpi.kernels.spec import KV_GROUP, KV_RUN, KV_WORD, PAGE_TOKENS, Batch

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


def code_bytes(head_dim: int, dtype: KvDtype) -> int:
    """Return the bytes of one key or value vector of one head without the factors of its groups."""
    match dtype:
        case "q8":
            return -(-head_dim // KV_WORD) * KV_WORD
        case "q4":
            return -(-head_dim // KV_RUN) * KV_RUN // 2
        case _:
            return head_dim * _ELEMENTS[dtype].itemsize


def vector_bytes(head_dim: int, dtype: KvDtype) -> int:
    """Return the bytes of one key or value vector of one head."""
    factors = {"q8": 2, "q4": 4}.get(dtype, 0)
    return code_bytes(head_dim, dtype) + factors * -(-head_dim // KV_GROUP)


def key_places(head_dim: int, dtype: KvDtype) -> npt.NDArray[np.int64]:
    """Return where each byte of the keys of one head lies in a page: `[PAGE_TOKENS, vector_bytes]`.

    See `KvPages` for the order of the bytes.
    """
    codes, vector = code_bytes(head_dim, dtype), vector_bytes(head_dim, dtype)
    unit = np.full(vector, 2 if dtype == "f16" else KV_WORD)
    unit[codes:] = 2  # the float16 numbers of the groups
    byte, first = np.arange(vector), np.where(np.arange(vector) < codes, 0, codes)
    begin = first + (byte - first) // unit * unit
    places: npt.NDArray[np.int64] = begin * PAGE_TOKENS + np.arange(PAGE_TOKENS)[:, None] * unit + byte - begin
    return places


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
    format of a vector:

    - float32 and float16: a vector is its `head_dim` values;
    - int8 (q8): `head_dim` codes, rounded up to whole words of 4 bytes, then the float16 scale of each group of 32; a
      value is scale * code;
    - uint8 (q4): 4-bit codes in runs of 16 values, 8 bytes each. Value `i` of a run is in the low half of byte `i`,
      value `i + 8` in its high half. Then come the float16 scale and minimum of each group of 32; a value is
      scale * code + minimum. Keys are transformed first (`tpi.kernels.paged.hadamard_rotate`).

    The values of a head in a page are `PAGE_TOKENS` vectors, one after the other. Its keys are the same bytes, but
    transposed, so that the CPU scores many tokens at once: in f32 and f16 the first value of every token, then the
    second of every token, and so on; in q8 and q4 the first word of 4 bytes of every token's codes, then the second
    words; after all words, the float16 numbers of the groups in the same way. `key_places` has the place of each byte.

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
