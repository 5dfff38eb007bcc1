"""Every kernel in plain numpy: the meaning of the native ones, and their stand-in where nothing can be compiled.

Weights in q8, q4 and q4s meet activations rounded in groups of 32 (to int8; for q8 to 15 bits), as in the native
kernels: row parts always, column parts where the layout is tiled. (In records the native 4-bit columns round activation
times scale to int8 over 8 neurons at a time; the reference does not follow that.) Slow and simple; each call
dequantises what it reads.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from tpi.config import Format
from tpi.errors import KernelError
from tpi.kernels.spec import (
    BLOCK_TOKENS,
    F32,
    I32,
    KV_GROUP,
    U8,
    AttentionSpec,
    Batch,
    FfnSpec,
    KvArray,
    Residual,
    Stage,
)
from tpi.pack.layout import GROUP, RunLayout, is_quantised
from tpi.pack.quantise import decode_part


def set_threads(count: int) -> None:
    """The reference leaves threads to BLAS; `count` is ignored."""


def threads() -> int:
    """One, as far as anybody here knows."""
    return 1


def use_isa(name: str) -> None:
    """There is one way to compute in numpy; `name` is ignored."""


def isa() -> str:
    """Name of the instruction set in use."""
    return "numpy"


def read(data: U8) -> None:
    """See `tpi.kernels.read`."""
    data.max(initial=0)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; `x` is `[tokens, hidden]`."""
    mean = np.mean(np.square(x, dtype=np.float32), axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis; `x` is `[tokens, hidden]`."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + np.float32(eps)) * weight
    return np.asarray(scaled if bias is None else scaled + bias, np.float32)


def dequantise(run: RunLayout, data: U8, part: str) -> F32:
    """The vectors of one part, `[units * width, hidden]` float32; `data` is the run's units, 1-D uint8."""
    _check_data(data, run.units * run.unit_bytes)
    return decode_part(run.part(part), run, data.reshape(run.units, run.unit_bytes))


def gather(run: RunLayout, data: U8, rows: I32) -> F32:
    """Rows of a table run, `[len(rows), hidden]` float32."""
    _check_range("row", rows, run.units * run.width)
    return np.ascontiguousarray(dequantise(run, data, run.parts[0].name)[rows])


def logits(run: RunLayout, data: U8, x: F32) -> F32:
    """`x` times every row of a table run, `[tokens, units * width]`; `x` is `[tokens, hidden]`, already normed."""
    return _rows(run, data, run.parts[0].name, x)


def add_residual(residual: Residual, x: F32, total: F32, norm: Callable[[F32, F32, float], F32] = rms_norm) -> F32:
    """`x` + the sum of all nodes' shares of a half-block, `[tokens, hidden]`; `norm` is the `rms_norm` to use."""
    if residual.bias is not None:
        total = total + residual.bias
    if residual.post_norm is not None:
        total = norm(total, residual.post_norm, residual.eps)
    return x + total


class Chain:
    """See `tpi.kernels.Chain`."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def run(self, x: F32, batch: Batch) -> F32:
        """See `tpi.kernels.Chain.run`."""
        for stage in self._stages:
            x = add_residual(stage.residual, x, _partial(stage, x, batch))
        return x


def _partial(stage: Stage, x: F32, batch: Batch) -> F32:
    if isinstance(stage.spec, FfnSpec):
        return ffn(stage.spec, stage.data, x)
    assert stage.keys is not None  # attention has both
    assert stage.values is not None
    return attention(stage.spec, stage.data, x, stage.keys, stage.values, batch)


def attention(spec: AttentionSpec, data: U8, x: F32, k: KvArray, v: KvArray, batch: Batch) -> F32:
    """One node's share of an attention half-block, `[tokens, hidden]`, before the bias of o and the residual.

    Norms `x`, projects it to q, k and v, rotates, appends k and v to the paged cache, attends, projects with o.
    `data` holds the query units, then the KV units; `k` and `v` are one layer of `tpi.kv.PagedKV` and are written.
    """
    tokens = _check_input(x, spec.query.hidden)
    split = spec.query.units * spec.query.unit_bytes
    _check_data(data, split + spec.kv.units * spec.kv.unit_bytes)
    query_data, kv_data = data[:split], data[split:]
    normed = _norm(spec, x)
    queries = _heads(_rows(spec.query, query_data, "q", normed), spec.q_bias, spec.heads, spec.head_dim)
    keys = _heads(_rows(spec.kv, kv_data, "k", normed), spec.k_bias, spec.kv_heads, spec.head_dim)
    values = _heads(_rows(spec.kv, kv_data, "v", normed), spec.v_bias, spec.kv_heads, spec.head_dim)
    if spec.q_norm is not None:
        queries = rms_norm(queries, spec.q_norm, spec.norm_eps)
    if spec.k_norm is not None:
        keys = rms_norm(keys, spec.k_norm, spec.norm_eps)
    _append(k, _rope(spec, keys, batch.positions), batch)
    _append(v, values, batch)
    mixed = _attend(spec, _rope(spec, queries, batch.positions), k, v, batch)
    padded = np.zeros((tokens, spec.query.units * spec.query.width), np.float32)
    padded[:, : spec.heads * spec.head_dim] = mixed.reshape(tokens, -1)
    return _columns(spec.query, query_data, "o", padded)


def ffn(spec: FfnSpec, data: U8, x: F32, active: I32 | None = None) -> F32:
    """One node's share of a feed-forward half-block, `[tokens, hidden]`, before the bias of down and the residual.

    `active` lists the local neurons to use, each at most once (record layout only); all of them where it is None.
    """
    _check_input(x, spec.neuron.hidden)
    _check_data(data, spec.neuron.units * spec.neuron.unit_bytes)
    if active is not None:
        return _sparse_ffn(spec, data, x, active)
    normed = _norm(spec, x)
    up = _biased(_rows(spec.neuron, data, "up", normed), spec.up_bias)
    gate = _biased(_rows(spec.neuron, data, "gate", normed), spec.gate_bias) if spec.gated else None
    return _columns(spec.neuron, data, "down", _activate(spec, gate, up))


def _sparse_ffn(spec: FfnSpec, data: U8, x: F32, active: I32) -> F32:
    run = spec.neuron
    neurons = run.units * run.width
    if run.layout != "record":
        raise KernelError("a list of active neurons needs a pack in the record layout; this one is tiled")
    _check_range("active neuron", active, neurons)
    normed = _norm(spec, x)
    up = _biased(_rows(run, data, "up", normed), spec.up_bias)
    gate = _biased(_rows(run, data, "gate", normed), spec.gate_bias) if spec.gated else None
    inner = _activate(spec, gate, up)
    mask = np.zeros(neurons, np.bool_)
    mask[active] = True
    return _columns(run, data, "down", np.where(mask, inner, np.float32(0)))


def round_activations(x: F32, weights: Format) -> F32:
    """`x` as the integer kernels see it: int8 times one scale (largest magnitude / 127) per 32 values.

    Where the weights are q8, a second int8 in 1/128 of the unit of the first is added to it.
    """
    steps = np.float32(128 if weights == "q8" else 1)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), np.float32(0))
    rounded = np.rint(groups * inverse.astype(np.float32) * steps) / steps * (largest / np.float32(127))
    return np.asarray(rounded.reshape(x.shape), np.float32)


def _rows(run: RunLayout, data: U8, name: str, x: F32) -> F32:
    if is_quantised(run.part(name).format):
        x = round_activations(x, run.part(name).format)
    return np.asarray(x @ dequantise(run, data, name).T, np.float32)


def _columns(run: RunLayout, data: U8, name: str, inner: F32) -> F32:
    if run.layout == "tiled":
        inner = round_activations(inner, run.part(name).format)
    return np.asarray(inner @ dequantise(run, data, name), np.float32)


def _norm(spec: AttentionSpec | FfnSpec, x: F32) -> F32:
    if spec.norm == "rms":
        return rms_norm(x, spec.norm_weight, spec.norm_eps)
    return layer_norm(x, spec.norm_weight, spec.norm_bias, spec.norm_eps)


def _biased(values: F32, bias: F32 | None) -> F32:
    return values if bias is None else values + bias


def _heads(values: F32, bias: F32 | None, heads: int, head_dim: int) -> F32:
    """`[tokens, units * width]` without padding, as `[tokens, heads, head_dim]`, plus the bias."""
    return _biased(values[:, : heads * head_dim], bias).reshape(-1, heads, head_dim)


def _rope(spec: AttentionSpec, heads: F32, positions: I32) -> F32:
    half = len(spec.inv_freq)
    if half == 0:
        return heads
    angles = positions.astype(np.float32)[:, None, None] * spec.inv_freq
    scale = np.float32(spec.rope_scale)
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _append(cache: KvArray, heads: F32, batch: Batch) -> None:
    """Store `[tokens, kv_heads, head_dim]` at each token's place in the paged cache."""
    blocks = batch.tables[batch.sequence, batch.positions // BLOCK_TOKENS]
    _check_range("KV block", blocks, len(cache))
    cache[blocks, :, batch.positions % BLOCK_TOKENS] = _encode_kv(heads) if cache.dtype == np.uint8 else heads


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


def _attend(spec: AttentionSpec, queries: F32, k: KvArray, v: KvArray, batch: Batch) -> F32:
    """Softmax attention of `[tokens, heads, head_dim]` queries, one token after the other."""
    mixed = np.empty_like(queries)
    for row in np.unique(batch.sequence):
        members = np.flatnonzero(batch.sequence == row)
        last = int(batch.positions[members].max())
        table = batch.tables[row, : last // BLOCK_TOKENS + 1]
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


def _activate(spec: FfnSpec, gate: F32 | None, up: F32) -> F32:
    if gate is None:
        return _activation(spec, up)
    return cast(F32, _activation(spec, gate) * up)


def _activation(spec: FfnSpec, x: F32) -> F32:
    one, half = np.float32(1), np.float32(0.5)
    if spec.activation == "relu":
        return np.asarray(np.maximum(x, np.float32(0)), np.float32)
    if spec.activation == "silu":
        return np.asarray(x / (one + np.exp(np.minimum(-x, np.float32(88)))), np.float32)
    if spec.activation == "gelu_tanh":
        inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(half * x * (one + np.tanh(inner)), np.float32)
    from scipy.special import erf

    return np.asarray(half * x * (one + erf(x * np.float32(np.sqrt(0.5)))), np.float32)


def _check_range(what: str, values: I32, limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise KernelError(f"a {what} is outside 0..{limit - 1}")


def _check_data(data: U8, expected: int) -> None:
    if data.dtype != np.uint8 or data.ndim != 1 or data.size != expected or not data.flags.c_contiguous:
        raise KernelError(f"weights must be {expected} contiguous bytes, not {data.dtype} of shape {data.shape}")


def _check_input(x: F32, hidden: int) -> int:
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != hidden or not x.flags.c_contiguous:
        raise KernelError(f"x must be contiguous float32 [tokens, {hidden}], not {x.dtype} of shape {x.shape}")
    return len(x)
