"""Heads that take more than a product: norms over those of all nodes, and keys and values from a latent vector.

Norms over all heads wait for sums that a node cannot make alone. Such a node projects heads as the weights make them
(`raw`), has the sums of their squares added up over all nodes, and finishes its heads with these. Where all heads are
here, the kernels do it in one call.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import biased, rms_norm, rows
from tpi.kernels.spec import F32, I32, U8, AttentionSpec, Batch, Input, KvArray, LatentSpec, Projected
from tpi.pack.layout import GROUP

_RAW = "without norms"  # under which a spec carries the one that projects its heads


def needs_sums(spec: AttentionSpec) -> bool:
    """Whether its norms are over heads of which some are on other nodes."""
    return spec.whole is not None and len(spec.whole.q) < spec.whole.q_values


def refuse_sums(spec: AttentionSpec) -> None:
    """Raise a KernelError if attention is asked for in one call that other nodes' sums are needed for."""
    if needs_sums(spec):
        raise KernelError(
            "the norm of these heads is over those of all nodes; project them, and attend when it is known"
        )


def is_plain(spec: AttentionSpec) -> bool:
    """Whether heads are finished by what all kernels know: biases, norms of each head, and RoPE."""
    return spec.whole is None and not spec.clip


def raw(spec: AttentionSpec) -> AttentionSpec:
    """The same heads with their biases, and neither norms, clipping nor RoPE."""
    found: AttentionSpec | None = vars(spec).get(_RAW)
    if found is None:
        none = np.empty(0, np.float32)
        found = vars(spec)[_RAW] = replace(spec, q_norm=None, k_norm=None, inv_freq=none, clip=0.0, whole=None)
    return found


def squares(spec: AttentionSpec, projected: Projected) -> F32:
    """The sums of the squares of this node's queries and keys, as `raw` has them, `[tokens, 2 * GROUP]`: each stands
    first in a group of zeros, so that the wires that round groups hardly touch it."""
    assert spec.whole is not None
    found = np.zeros((len(projected.queries), 2 * GROUP), np.float32)
    for at, heads in enumerate((projected.queries, projected.keys[:, spec.whole.counted])):
        found[:, at * GROUP] = np.square(heads.reshape(len(heads), -1)).sum(axis=1)
    return found


def finished(spec: AttentionSpec, projected: Projected, positions: I32, sums: F32 | None = None) -> Projected:
    """Heads that `raw` projected as they are attended with; `sums` are the `squares` of all nodes together, or those of
    these heads alone, if they are all."""
    from tpi.kernels.paged import rope

    queries, keys, values = projected.queries, projected.keys, projected.values
    if (whole := spec.whole) is not None:
        given = squares(spec, projected) if sums is None else sums
        queries = _normed(queries, whole.q, given[:, 0] / np.float32(whole.q_values), spec.norm.eps)
        keys = _normed(keys, whole.k, given[:, GROUP] / np.float32(whole.k_values), spec.norm.eps)
    if spec.q_norm is not None:
        queries = rms_norm(queries, spec.q_norm, spec.norm.eps)
    if spec.k_norm is not None:
        keys = rms_norm(keys, spec.k_norm, spec.norm.eps)
    if spec.clip:
        queries, keys, values = (np.clip(heads, -spec.clip, spec.clip) for heads in (queries, keys, values))
    queries, keys = (rope(spec, heads, positions) for heads in (queries, keys))
    return Projected(*(np.ascontiguousarray(heads, np.float32) for heads in (queries, keys, values)))


def from_latent(spec: AttentionSpec, latent: LatentSpec, latent_data: U8, kv_data: U8, normed: F32) -> tuple[F32, F32]:
    """Keys before RoPE, and values, `[tokens, kv_heads, head_dim]` each, by way of the latent vector of the block's
    normed input `[tokens, hidden]` (DeepSeek-V2, section 2.1)."""
    values = rows(latent.run, latent_data, "latent", normed)[:, : latent.rank + latent.rope]
    values = biased(values, latent.bias)
    ranked = rms_norm(np.ascontiguousarray(values[:, : latent.rank]), latent.norm.weight, latent.norm.eps)
    shape = (len(normed), spec.kv_heads, latent.width)
    k, v = (rows(spec.kv, kv_data, part, ranked)[:, : shape[1] * shape[2]].reshape(shape) for part in ("k", "v"))
    shared = np.repeat(values[:, None, latent.rank :], spec.kv_heads, axis=1)
    own, missing = spec.head_dim - latent.rope, spec.head_dim - latent.width
    return np.concatenate([shared, k[..., :own]], axis=-1), np.pad(v, ((0, 0), (0, 0), (0, missing)))


class Steps(Protocol):
    """The kernels that attend in steps."""

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """See `tpi.kernels.Kernels`."""

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """See `tpi.kernels.Kernels`."""

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """See `tpi.kernels.Kernels`."""


def projected_on_host(kernels: Steps, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
    """`Kernels.project` of heads that are not plain, for kernels that know those alone."""
    heads = kernels.project(raw(spec), data, x, positions)
    return heads if needs_sums(spec) else finished(spec, heads, positions)


def attention_in_steps(
    kernels: Steps, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch
) -> F32:
    """`Kernels.attention` of such heads."""
    refuse_sums(spec)
    heads = projected_on_host(kernels, spec, data, x, batch.positions)
    return kernels.output(spec, data, kernels.attend(spec, heads, keys, values, batch))


def _normed(heads: F32, weight: F32, mean: F32, eps: float) -> F32:
    scale = 1 / np.sqrt(mean + np.float32(eps))
    return np.asarray(heads * scale[:, None, None] * weight.reshape(1, *heads.shape[1:]), np.float32)
