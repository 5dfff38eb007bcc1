"""Launches of the Triton kernels for attention: norm and rotation of heads, appending to the cache, attending.

The caller has checked all arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tpi.devices.cuda.backend import Tensor, launch, power
from tpi.devices.cuda.programs import attend as attending
from tpi.devices.cuda.programs import heads
from tpi.devices.cuda.programs import pages as storing
from tpi.kernels.kv import KvDtype
from tpi.kernels.spec import I32, KV_GROUP, PAGE_TOKENS, AttentionSpec, Batch

_BLOCK = 16  # tokens that attend together: the fewest that `tl.dot` takes
_PROGRAMS = 512  # programs of attention at once: a long context is split until there are about so many


@dataclass(frozen=True)
class CardBatch:
    """The positions and page tables of a batch in a card's memory.

    Attributes:
        positions, sequence, tables: as in `tpi.kernels.spec.Batch`.
        pages: most pages that one token attends to.
        blocks: `[blocks, 2]`, first token and count of runs of one sequence; None if runs are too short to gain.
    """

    positions: Tensor
    sequence: Tensor
    tables: Tensor
    pages: int
    blocks: Tensor | None

    @classmethod
    def from_batch(cls, batch: Batch, copy: Callable[[I32], Tensor]) -> "CardBatch":
        """Copy a checked batch to the card; `copy` copies one array."""
        pages = int(batch.positions.max(initial=0)) // PAGE_TOKENS + 1
        blocks = blocks_of(batch.sequence)
        worth = len(batch.sequence) >= _BLOCK and len(batch.sequence) >= 4 * len(blocks)
        there = copy(batch.positions), copy(batch.sequence), copy(batch.tables)
        return cls(*there, pages, copy(blocks) if worth else None)


@dataclass(frozen=True)
class Pages:
    """The KV pages of one layer: keys and values `[pages, kv_heads, 32 tokens, vector]`, and their format."""

    format: KvDtype
    keys: Tensor
    values: Tensor


def blocks_of(sequence: I32) -> I32:
    """Return runs of at most 16 tokens of one sequence: `[blocks, 2]` int32, first token and count of each."""
    changes = np.flatnonzero(np.diff(sequence)) + 1
    runs = zip([0, *changes.tolist()], [*changes.tolist(), len(sequence)], strict=True)
    found = [(at, min(_BLOCK, end - at)) for begin, end in runs for at in range(begin, end, _BLOCK)]
    return np.array(found, np.int32).reshape(-1, 2)


def finish_heads(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, rotary: tuple[Tensor, Tensor, float] | None,
    shape: tuple[int, int], eps: float,
) -> Tensor:  # fmt: skip
    """Reshape `x`, `[tokens, units * width]`, to `[tokens, *shape]`, then apply bias, head norm and RoPE, if given.

    `weight` and `eps` are those of the norm. `rotary` is positions, frequencies and the scale. `shape` is
    `(heads, head_dim)`.
    """
    count, head_dim = shape
    out = x.new_empty(len(x), count, head_dim)
    positions, inv_freq, scale = rotary if rotary else (x, x, 1.0)
    half = len(inv_freq) if rotary else 0
    launch(
        heads.finish_heads, (len(x), count), x, x if bias is None else bias, x if weight is None else weight, positions,
        inv_freq, out, x.shape[1], head_dim, half, eps, scale, BIASED=bias is not None, NORMED=weight is not None,
        ROTATED=half > 0, SIZE=power(head_dim),
    )  # fmt: skip
    return out


def hadamard_rotate(heads: Tensor) -> Tensor:
    """Apply `tpi.kernels.paged.hadamard_rotate` to `heads`, contiguous `[tokens, heads, head_dim]`."""
    out, head_dim = torch.empty_like(heads), heads.shape[-1]
    launch(
        storing.spread, (heads.shape[0] * heads.shape[1],), heads, out, head_dim, GROUPS=power(-(-head_dim // KV_GROUP))
    )
    return out


def append(pages: Pages, keys: Tensor, values: Tensor, step: CardBatch) -> None:
    """Store `keys` and `values`, `[tokens, kv_heads, head_dim]`, in the pages.

    `step` has each token's place in the pages.
    """
    tokens, count, head_dim = keys.shape
    for cache, new in ((pages.keys, keys), (pages.values, values)):
        launch(
            storing.append, (tokens, count), cache, new, step.positions, step.sequence, step.tables, head_dim,
            cache.shape[-1], step.tables.shape[1], FORMAT=pages.format, KEYS=cache is pages.keys,
            GROUPS=power(-(-head_dim // KV_GROUP)),
        )  # fmt: skip


def mix(spec: AttentionSpec, kv_index: Tensor, queries: Tensor, pages: Pages, step: CardBatch) -> Tensor:
    """Return attention of queries `[tokens, heads, head_dim]` over pages: `[tokens, heads * head_dim]`.

    `kv_index` has the KV head of each query head; `step` has the tokens' positions and page tables.
    """
    tokens, count, head_dim = queries.shape
    out = queries.new_empty(tokens, count * head_dim)
    programs = (tokens if step.blocks is None else len(step.blocks)) * count
    splits = max(1, min(step.pages, _PROGRAMS // max(1, programs)))
    mixed = queries.new_empty(tokens * count * splits * head_dim)
    largest, weight = (queries.new_empty(tokens * count * splits) for _ in range(2))
    given = (queries, pages.keys, pages.values, kv_index, step.positions, step.sequence, step.tables)
    numbers = (head_dim, spec.kv_heads, pages.keys.shape[-1], step.tables.shape[1], -(-step.pages // splits),
               spec.attention_scale, spec.softcap, spec.window)  # fmt: skip
    known = {"FORMAT": pages.format, "CAPPED": spec.softcap > 0}
    if step.blocks is None:
        launch(
            attending.attend, (tokens, count, splits), *given, mixed, largest, weight, *numbers,
            SIZE=power(head_dim), **known,
        )  # fmt: skip
    else:
        launch(
            attending.attend_many, (len(step.blocks), count, splits), *given, step.blocks, mixed, largest, weight,
            *numbers, SIZE=max(16, power(head_dim)), TOKENS=_BLOCK, **known,
        )  # fmt: skip
    launch(
        attending.merge, (tokens * count,), mixed, largest, weight, out, head_dim, splits, SIZE=power(head_dim),
        SPLITS=power(splits),
    )  # fmt: skip
    return out
