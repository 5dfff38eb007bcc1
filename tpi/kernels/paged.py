"""Attention over paged keys and values as the reference computes it: heads, rotation, the cache's formats, softmax."""

import numpy as np

from tpi.kernels.arithmetic import biased, check_range
from tpi.kernels.spec import F32, I32, KV_GROUP, PAGE_TOKENS, U8, AttentionSpec, Batch, KvArray


def heads_of(values: F32, bias: F32 | None, heads: int, head_dim: int) -> F32:
    """`[tokens, units * width]` without padding, as `[tokens, heads, head_dim]`, plus the bias."""
    return biased(values[:, : heads * head_dim], bias).reshape(-1, heads, head_dim)


def rope(spec: AttentionSpec, heads: F32, positions: I32) -> F32:
    """`[tokens, heads, head_dim]`, each rotated by its token's position."""
    half = len(spec.inv_freq)
    if half == 0:
        return heads
    angles = positions.astype(np.float32)[:, None, None] * spec.inv_freq
    scale = np.float32(spec.rope_scale)
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def append(cache: KvArray, heads: F32, batch: Batch) -> None:
    """Store `[tokens, kv_heads, head_dim]` at each token's place in the paged cache."""
    blocks = batch.tables[batch.sequence, batch.positions // PAGE_TOKENS]
    check_range("page", blocks, len(cache))
    cache[blocks, :, batch.positions % PAGE_TOKENS] = _encode_kv(heads) if cache.dtype == np.uint8 else heads


def _encode_kv(heads: F32) -> U8:
    """q8 vectors: head_dim int8 codes, then one f16 scale per 32 of them."""
    head_dim = heads.shape[-1]
    groups = np.pad(heads, [(0, 0), (0, 0), (0, -head_dim % KV_GROUP)]).reshape(*heads.shape[:-1], -1, KV_GROUP)
    scales = (np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)
    codes = np.rint(groups * np.where(wide > 0, 1 / np.where(wide > 0, wide, 1), 0))
    codes = np.clip(codes, -127, 127).astype(np.int8).reshape(*heads.shape[:-1], -1)[..., :head_dim]
    return np.concatenate([codes.view(np.uint8), scales[..., 0].view(np.uint8)], axis=-1)


def _read_kv(cache: KvArray, table: I32, head_dim: int) -> F32:
    """The vectors of one sequence, `[tokens, kv_heads, head_dim]`, from the blocks in `table`."""
    stored = cache[table].swapaxes(1, 2)
    stored = stored.reshape(-1, *stored.shape[2:])
    if cache.dtype != np.uint8:
        return np.asarray(stored, np.float32)
    codes = np.ascontiguousarray(stored[..., :head_dim]).view(np.int8).astype(np.float32)
    scales = np.ascontiguousarray(stored[..., head_dim:]).view(np.float16).astype(np.float32)
    values: F32 = codes * np.repeat(scales, KV_GROUP, axis=-1)[..., :head_dim]
    return values


def attend(spec: AttentionSpec, queries: F32, k: KvArray, v: KvArray, batch: Batch) -> F32:
    """Softmax attention of `[tokens, heads, head_dim]` queries, one token after the other."""
    mixed = np.empty_like(queries)
    for row in np.unique(batch.sequence):
        members = np.flatnonzero(batch.sequence == row)
        last = int(batch.positions[members].max())
        table = batch.tables[row, : last // PAGE_TOKENS + 1]
        keys, values = _read_kv(k, table, spec.head_dim), _read_kv(v, table, spec.head_dim)
        for token in members:
            position = int(batch.positions[token])
            first = max(0, position - spec.window + 1) if spec.window else 0
            mixed[token] = _attend_one(spec, queries[token], keys[first : position + 1], values[first : position + 1])
    return mixed


def _attend_one(spec: AttentionSpec, query: F32, keys: F32, values: F32) -> F32:
    scores = np.einsum("hd,thd->ht", query, keys[:, spec.kv_index]) * np.float32(spec.attention_scale)
    if spec.softcap:
        scores = np.tanh(scores / np.float32(spec.softcap)) * np.float32(spec.softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("ht,thd->hd", weights, values[:, spec.kv_index]), np.float32)
