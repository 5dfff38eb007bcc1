"""A sample of attention to be timed: one new token in each of several sequences, with random heads, keys and values."""

from dataclasses import dataclass

import numpy as np

from tpi.devices.pages import page_buffer
from tpi.kernels import Kernels
from tpi.kernels.kv import KvDtype, KvPages, vector_bytes
from tpi.kernels.paged import encode_keys, encode_kv
from tpi.kernels.spec import F32, PAGE_TOKENS, AttentionSpec, Batch, NormSpec, Projected
from tpi.pack.layout import Part, RunLayout

_HIDDEN = 32  # hidden size; the sample computes no projections


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and KV heads, and the dimension of each head."""

    query: int
    kv: int
    dim: int


MIXTRAL = Heads(32, 8, 128)


@dataclass(frozen=True)
class AttentionSample:
    """Arguments of `tpi.kernels.Kernels.attend`, and the bytes of keys and values that it reads."""

    spec: AttentionSpec
    projected: Projected
    pages: KvPages
    batch: Batch
    nbytes: int  # of keys and values

    @classmethod
    def of(
        cls, heads: Heads, kv_dtype: KvDtype, sequences: int, context: int, cached: bool = False
    ) -> "AttentionSample":
        """Create a sample of `sequences` sequences of `context` tokens each, the new one included.

        With `cached`, the sequences share all pages except the last, so that the processor's caches hold them.
        """
        random, pages = np.random.default_rng(0), -(-context // PAGE_TOKENS)
        tables = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
        if cached:
            tables = np.concatenate(
                [np.tile(tables[:1, :-1], (sequences, 1)), pages - 1 + tables[:, :1] // pages], axis=1
            )
        kv = KvPages.allocate([0], int(tables.max()) + 1, heads.kv, heads.dim, kv_dtype, page_buffer)
        page = random.normal(size=(heads.kv, PAGE_TOKENS, heads.dim)).astype(np.float32)
        kv.keys[0][:] = encode_keys(page, kv.keys[0].dtype)
        kv.values[0][:] = encode_kv(page, kv.values[0].dtype)
        batch = Batch(np.full(sequences, context - 1, np.int32), np.arange(sequences, dtype=np.int32), tables)
        nbytes = 2 * sequences * context * heads.kv * vector_bytes(heads.dim, kv_dtype)
        return cls(_spec(heads), _projected(heads, sequences, random), kv, batch, nbytes)

    def run(self, kernels: Kernels) -> F32:
        """Compute the attention of the sample with `kernels`; return `[tokens, heads * head_dim]`."""
        return kernels.attend(self.spec, self.projected, self.pages.keys[0], self.pages.values[0], self.batch)


def _spec(heads: Heads) -> AttentionSpec:
    query = RunLayout(
        "query", "record", (Part("q", "f32", "row"), Part("o", "f32", "column")), heads.dim, _HIDDEN, heads.query
    )
    kv = RunLayout("kv", "record", (Part("k", "f32", "row"), Part("v", "f32", "row")), heads.dim, _HIDDEN, heads.kv)
    return AttentionSpec(
        query=query, kv=kv, heads=heads.query, kv_heads=heads.kv, head_dim=heads.dim,
        kv_index=np.arange(heads.query, dtype=np.int32) * heads.kv // heads.query,
        norm=NormSpec("rms", 1e-5, np.ones(_HIDDEN, np.float32)),
        q_bias=None, k_bias=None, v_bias=None, q_norm=None, k_norm=None, inv_freq=np.zeros(0, np.float32),
        rope_scale=1.0, attention_scale=heads.dim**-0.5, softcap=0.0, window=0,
    )  # fmt: skip


def _projected(heads: Heads, sequences: int, random: "np.random.Generator") -> Projected:
    counts = (heads.query, heads.kv, heads.kv)
    return Projected(*(random.normal(size=(sequences, count, heads.dim)).astype(np.float32) for count in counts))
