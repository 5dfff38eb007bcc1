"""Attention over paged keys and values in the reference kernels: heads, rotation, the cache's formats, softmax."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.kernels.arithmetic import biased, check_range
from tpi.kernels.kv import code_bytes, key_places, kv_dtype_of
from tpi.kernels.spec import F32, I32, KV_GROUP, KV_RUN, PAGE_TOKENS, AttentionSpec, Batch, KvArray


def heads_of(values: F32, bias: F32 | None, heads: int, head_dim: int) -> F32:
    """Reshape `values`, `[tokens, units * width]`, to `[tokens, heads, head_dim]` without padding; add the bias."""
    return biased(values[:, : heads * head_dim], bias).reshape(-1, heads, head_dim)


def rope(spec: AttentionSpec, heads: F32, positions: I32) -> F32:
    """Return `heads`, `[tokens, heads, head_dim]`, each rotated by its token's position (RoPE)."""
    half = len(spec.inv_freq)
    if half == 0:
        return heads
    angles = positions.astype(np.float32)[:, None, None] * spec.inv_freq
    scale = np.float32(spec.rope_scale)
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def append_keys(cache: KvArray, heads: F32, batch: Batch) -> None:
    """Store the keys `heads`, `[tokens, kv_heads, head_dim]`, at each token's place in the paged cache of keys."""
    pages, (bytes_of, places) = _pages_of(cache, batch), _key_bytes(cache, heads.shape[-1])
    stored = np.ascontiguousarray(encode_kv(heads, cache.dtype)).view(np.uint8)
    bytes_of[
        pages[:, None, None], np.arange(cache.shape[1])[:, None], places[batch.positions % PAGE_TOKENS][:, None]
    ] = stored


def append_values(cache: KvArray, heads: F32, batch: Batch) -> None:
    """Store the values `heads`, `[tokens, kv_heads, head_dim]`, at each token's place in the paged cache of values."""
    cache[_pages_of(cache, batch), :, batch.positions % PAGE_TOKENS] = encode_kv(heads, cache.dtype)


def encode_keys(keys: F32, element: np.dtype[Any]) -> KvArray:
    """Encode whole pages of keys, `[..., PAGE_TOKENS, head_dim]`, for a cache of dtype `element`."""
    vectors = np.ascontiguousarray(encode_kv(keys, element))
    stored = np.empty_like(vectors)
    bytes_of, places = _key_bytes(stored, keys.shape[-1])
    bytes_of[..., places] = vectors.view(np.uint8)
    return stored


def decode_keys(stored: KvArray, head_dim: int) -> F32:
    """Return the keys of whole pages, `[..., PAGE_TOKENS, head_dim]`, from `stored`, `[..., PAGE_TOKENS, vector]`."""
    bytes_of, places = _key_bytes(np.ascontiguousarray(stored), head_dim)
    return decode_kv(np.take(bytes_of, places, axis=-1).view(stored.dtype), head_dim)


def _key_bytes(pages: KvArray, head_dim: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the bytes of pages of keys, `[..., bytes of a page]`, and where each byte of each key lies in a page."""
    dtype = kv_dtype_of(pages)
    assert dtype is not None
    return pages.view(np.uint8).reshape(*pages.shape[:-2], -1), key_places(head_dim, dtype)


def _pages_of(cache: KvArray, batch: Batch) -> I32:
    """Return the page of each token; raise KernelError unless all are in `cache`."""
    pages = batch.tables[batch.sequence, batch.positions // PAGE_TOKENS]
    check_range("page", pages, len(cache))
    return pages


def hadamard_rotate(heads: F32) -> F32:
    """Multiply each whole group of 32 values of `heads`, `[..., head_dim]`, by the Hadamard matrix / sqrt(32).

    This transform is its own inverse. Keys in q4 are stored so, and their queries are transformed alike, so that
    products stay the same. A dimension that is large in all keys then no longer sets the scale of its group (as in
    QuaRot, arXiv:2404.00456).
    """
    whole = heads.shape[-1] // KV_GROUP * KV_GROUP
    values = heads[..., :whole]
    for reach in (16, 8, 4, 2, 1):
        pairs = values.reshape(*heads.shape[:-1], -1, 2, reach)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        values = np.stack([first + second, first - second], axis=-2).reshape(*heads.shape[:-1], whole)
    return np.concatenate([values * np.float32(KV_GROUP**-0.5), heads[..., whole:]], axis=-1)


def encode_kv(heads: F32, element: np.dtype[Any]) -> KvArray:
    """Encode the vectors `heads`, `[..., head_dim]`, for a cache of dtype `element` (see `tpi.kernels.kv.KvPages`)."""
    if element == np.int8:
        return _encode_q8(heads)
    return _encode_q4(heads) if element == np.uint8 else heads.astype(element)


def decode_kv(stored: KvArray, head_dim: int) -> F32:
    """Return the vectors that `encode_kv` stored: `[..., head_dim]`."""
    if stored.dtype == np.int8:
        return _decode_q8(stored, head_dim)
    return _decode_q4(stored, head_dim) if stored.dtype == np.uint8 else np.asarray(stored, np.float32)


def _encode_q8(heads: F32) -> KvArray:
    groups = _grouped(heads)
    scales = (np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    codes = np.clip(np.rint(groups * _inverse(scales)), -127, 127).astype(np.int8).reshape(*heads.shape[:-1], -1)
    codes[..., heads.shape[-1] :] = 0
    codes = codes[..., : code_bytes(heads.shape[-1], "q8")]
    return np.concatenate([codes, scales[..., 0].view(np.int8)], axis=-1)


def _decode_q8(stored: KvArray, head_dim: int) -> F32:
    scales = np.ascontiguousarray(stored[..., code_bytes(head_dim, "q8") :]).view(np.float16).astype(np.float32)
    values: F32 = stored[..., :head_dim].astype(np.float32) * np.repeat(scales, KV_GROUP, axis=-1)[..., :head_dim]
    return values


def _encode_q4(heads: F32) -> KvArray:
    head_dim = heads.shape[-1]
    groups = _grouped(heads)
    least, most = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    factors = np.concatenate([(most - least) / np.float32(15), least], axis=-1).astype(np.float16)
    codes = np.rint((groups - factors[..., 1:].astype(np.float32)) * _inverse(factors[..., :1]))
    codes = np.clip(codes, 0, 15).astype(np.uint8).reshape(*heads.shape[:-1], -1)
    codes[..., head_dim:] = 0
    runs = codes[..., : -(-head_dim // KV_RUN) * KV_RUN].reshape(*heads.shape[:-1], -1, 2, KV_RUN // 2)
    packed = (runs[..., 0, :] | runs[..., 1, :] << 4).reshape(*heads.shape[:-1], -1)
    return np.concatenate([packed, factors.view(np.uint8).reshape(*heads.shape[:-1], -1)], axis=-1)


def _decode_q4(stored: KvArray, head_dim: int) -> F32:
    size = code_bytes(head_dim, "q4")
    runs = stored[..., :size].view(np.uint8).reshape(*stored.shape[:-1], -1, 1, KV_RUN // 2)
    codes = np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*stored.shape[:-1], -1)[..., :head_dim]
    factors = np.ascontiguousarray(stored[..., size:]).view(np.float16).astype(np.float32)
    scales, minima = (np.repeat(factors[..., which::2], KV_GROUP, axis=-1)[..., :head_dim] for which in (0, 1))
    return np.asarray(codes * scales + minima, np.float32)


def _grouped(heads: F32) -> F32:
    """Return `heads` in groups, `[..., groups, 32]`.

    An incomplete group is padded with its last value, so that its range does not change.
    """
    whole = np.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, -heads.shape[-1] % KV_GROUP)], mode="edge")
    return whole.reshape(*heads.shape[:-1], -1, KV_GROUP)


def _inverse(scales: npt.NDArray[np.float16]) -> F32:
    wide = scales.astype(np.float32)
    return np.asarray(np.where(wide > 0, 1 / np.where(wide > 0, wide, 1), 0), np.float32)


def _in_order(vectors: F32) -> F32:
    """Reshape vectors of a sequence, `[pages, kv_heads, 32, head_dim]`, to `[tokens, kv_heads, head_dim]`."""
    pages, heads, tokens, head_dim = vectors.shape
    return np.swapaxes(vectors, 1, 2).reshape(pages * tokens, heads, head_dim)


def attend(spec: AttentionSpec, queries: F32, k: KvArray, v: KvArray, batch: Batch) -> F32:
    """Return the softmax attention of `queries`, `[tokens, heads, head_dim]`, computed one token after the other."""
    mixed = np.empty_like(queries)
    for row in np.unique(batch.sequence):
        members = np.flatnonzero(batch.sequence == row)
        last = int(batch.positions[members].max())
        table = batch.tables[row, : last // PAGE_TOKENS + 1]
        keys = _in_order(decode_keys(k[table], spec.head_dim))
        values = _in_order(decode_kv(v[table], spec.head_dim))
        for token in members:
            position = int(batch.positions[token])
            first = max(0, position - spec.window + 1) if spec.window else 0
            mixed[token] = _attend_one(spec, queries[token], keys[first : position + 1], values[first : position + 1])
    return mixed


def _attend_one(spec: AttentionSpec, query: F32, keys: F32, values: F32) -> F32:
    scores = np.einsum("hd,thd->ht", query, keys[:, spec.kv_index]) * np.float32(spec.attention_scale)
    if spec.softcap:
        scores = np.tanh(scores / np.float32(spec.softcap)) * np.float32(spec.softcap)
    sinks = np.full((len(scores), 1), -np.inf, np.float32) if spec.sinks is None else spec.sinks[:, None]
    most = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    weights = np.exp(scores - most)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - most)
    return np.asarray(np.einsum("ht,thd->hd", weights, values[:, spec.kv_index]), np.float32)
