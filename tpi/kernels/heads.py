"""Heads that take more than a product: norms over the heads of all nodes, and keys and values from a latent vector.

A norm over the heads of all nodes needs a sum that one node cannot compute. So each node projects its heads without
norms (`without_norms`), the sums of their squares (`squares`) are added up over all nodes, and each node normalises its
heads with the total (`apply_norms_and_rope`). If a node holds all heads, the kernels do this in one call.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import biased, rms_norm, rows
from tpi.kernels.spec import F32, I32, U8, AttentionSpec, Batch, Input, KvArray, LatentSpec, Projected, QueryLatentSpec
from tpi.pack.layout import GROUP

_RAW = "without norms"  # key in a spec's `__dict__` of the cached spec without norms


def needs_sums(spec: AttentionSpec) -> bool:
    """Return True if the norms of `spec` are over heads of which some are on other nodes."""
    return spec.whole is not None and len(spec.whole.q) < spec.whole.q_values


def refuse_sums(spec: AttentionSpec) -> None:
    """Raise KernelError if `spec` cannot attend in one call, since its norms need the sums of other nodes."""
    if needs_sums(spec):
        raise KernelError(
            "the norm of these heads is over the heads of all nodes, so attention cannot be one call; "
            "call project(), sum the squares over all nodes, then call attend()"
        )


def is_plain(spec: AttentionSpec) -> bool:
    """Return True if heads need only biases, norms of queries and keys, then RoPE, which all kernels support."""
    plain = spec.whole is None and spec.v_norm is None
    return plain and not (spec.clip or spec.growth or spec.late_norms)


def without_norms(spec: AttentionSpec) -> AttentionSpec:
    """Return a spec of the same heads with their biases, but without norms, clipping and RoPE.

    It is cached in `spec`.
    """
    found: AttentionSpec | None = vars(spec).get(_RAW)
    if found is None:
        none = np.empty(0, np.float32)
        found = vars(spec)[_RAW] = replace(
            spec,
            q_norm=None,
            k_norm=None,
            v_norm=None,
            inv_freq=none,
            clip=0.0,
            growth=0.0,
            whole=None,
            late_norms=False,
        )
    return found


def squares(spec: AttentionSpec, projected: Projected) -> F32:
    """Return the sums of the squares of this node's queries and keys, float32 `[tokens, 2 * GROUP]`.

    `projected` are the heads of the spec `without_norms(spec)`. Each sum is the first value of a group whose other
    values are zero, so that wire formats that round groups hardly change it.
    """
    assert spec.whole is not None
    found = np.zeros((len(projected.queries), 2 * GROUP), np.float32)
    for at, heads in enumerate((projected.queries, projected.keys[:, spec.whole.counted])):
        found[:, at * GROUP] = np.square(heads.reshape(len(heads), -1)).sum(axis=1)
    return found


def apply_norms_and_rope(
    spec: AttentionSpec, projected: Projected, positions: I32, sums: F32 | None = None
) -> Projected:
    """Return the heads `projected`, which have only biases, after norms, clipping and RoPE.

    `sums` is the total of `squares` over all nodes; None if this node holds all heads.
    """
    from tpi.kernels.paged import rope

    queries, keys, values = projected.queries, projected.keys, projected.values
    if (whole := spec.whole) is not None:
        given = squares(spec, projected) if sums is None else sums
        queries = _normed(queries, whole.q, given[:, 0] / np.float32(whole.q_values), spec.norm.eps)
        keys = _normed(keys, whole.k, given[:, GROUP] / np.float32(whole.k_values), spec.norm.eps)
    if not spec.late_norms:
        queries, keys = _head_norms(spec, queries, keys)
    if spec.v_norm is not None:
        values = rms_norm(values, spec.v_norm, spec.norm.eps)
    if spec.clip:
        queries, keys, values = (np.clip(heads, -spec.clip, spec.clip) for heads in (queries, keys, values))
    queries, keys = (rope(spec, heads, positions) for heads in (queries, keys))
    if spec.late_norms:
        queries, keys = _head_norms(spec, queries, keys)
    if spec.growth:
        steps = (1 + positions // spec.growth_tokens).astype(np.float32)
        queries = queries * (1 + np.float32(spec.growth) * np.log(steps))[:, None, None]
    queries, keys, values = (np.ascontiguousarray(heads, np.float32) for heads in (queries, keys, values))
    return Projected(queries, keys, values, projected.gate)


def _head_norms(spec: AttentionSpec, queries: F32, keys: F32) -> tuple[F32, F32]:
    """Return queries and keys, `[tokens, heads, head_dim]`, after the norm of each head, if there is one."""
    eps = spec.norm.eps
    queries = queries if spec.q_norm is None else rms_norm(queries, spec.q_norm, eps)
    return queries, keys if spec.k_norm is None else rms_norm(keys, spec.k_norm, eps)


def from_latent(spec: AttentionSpec, latent: LatentSpec, latent_data: U8, kv_data: U8, normed: F32) -> tuple[F32, F32]:
    """Return keys before RoPE, and values, computed from the latent vector (DeepSeek-V2, section 2.1).

    `normed` is the block's normed input, `[tokens, hidden]`; `latent_data` and `kv_data` are the bytes of the units of
    the runs `latent` and `kv`. Keys and values are `[tokens, kv_heads, head_dim]`.
    """
    values = rows(latent.run, latent_data, "latent", normed)[:, : latent.rank + latent.rope]
    values = biased(values, latent.bias)
    ranked = rms_norm(np.ascontiguousarray(values[:, : latent.rank]), latent.norm.weight, latent.norm.eps)
    shape = (len(normed), spec.kv_heads, latent.width)
    k, v = (rows(spec.kv, kv_data, part, ranked)[:, : shape[1] * shape[2]].reshape(shape) for part in ("k", "v"))
    shared = np.repeat(values[:, None, latent.rank :], spec.kv_heads, axis=1)
    own, missing = spec.head_dim - latent.rope, spec.head_dim - latent.width
    return np.concatenate([shared, k[..., :own]], axis=-1), np.pad(v, ((0, 0), (0, 0), (0, missing)))


def from_query_latent(latent: QueryLatentSpec, latent_data: U8, up_data: U8, normed: F32) -> F32:
    """Return queries before RoPE, `[tokens, vectors of the up run]`, from the block's normed input.

    `latent_data` and `up_data` are the bytes of the units of the runs `latent.run` and `latent.up`.
    """
    rank = len(latent.norm.weight)
    values = biased(rows(latent.run, latent_data, "q_latent", normed)[:, :rank], latent.bias)
    ranked = rms_norm(np.ascontiguousarray(values), latent.norm.weight, latent.norm.eps)
    return rows(latent.up, up_data, "q", ranked)


class Steps(Protocol):
    """The calls that compute attention in steps: project, attend and output."""

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`."""

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""


def projected_on_host(kernels: Steps, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
    """Return the projected heads of a spec that is not plain (`is_plain`), from kernels that support only plain specs.

    The kernels project; the host applies norms, clipping and RoPE.
    """
    heads = kernels.project(without_norms(spec), data, x, positions)
    return heads if needs_sums(spec) else apply_norms_and_rope(spec, heads, positions)


def attention_in_steps(
    kernels: Steps, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch
) -> F32:
    """Compute `Kernels.attention` for heads that are not plain (`is_plain`) as three calls: project, attend, output."""
    refuse_sums(spec)
    heads = projected_on_host(kernels, spec, data, x, batch.positions)
    return kernels.output(spec, data, kernels.attend(spec, heads, keys, values, batch))


def _normed(heads: F32, weight: F32, mean: F32, eps: float) -> F32:
    scale = 1 / np.sqrt(mean + np.float32(eps))
    return np.asarray(heads * scale[:, None, None] * weight.reshape(1, *heads.shape[1:]), np.float32)
