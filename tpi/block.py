"""The two halves of a Transformer layer as one node computes them: a partial result here, the rest after the sum.

A block knows its static shape (a kernel spec) and its small vectors. Its big weights are handed in for each call as one
buffer of bytes, because they come and go; it does no I/O and knows nothing of ranks or sockets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tpi.config import ModelConfig
from tpi.kernels import Kernels
from tpi.kernels.spec import AttentionSpec, Batch, FfnSpec, NormSpec, Residual, Stage
from tpi.kv import PagedKV
from tpi.pack.layout import RunLayout
from tpi.partition import FFN_UNIT, Range, Shard

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Vectors = Mapping[str, F32]


@dataclass(frozen=True)
class AttentionBlock:
    """This node's heads of one layer's attention."""

    layer: int
    spec: AttentionSpec
    residual: Residual
    complete: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """What a trace calls it."""
        return f"attention {self.layer}"

    def partial(self, kernels: Kernels, data: Bytes, x: F32, kv: PagedKV, batch: Batch) -> F32:
        """Attention output of the local heads, `[tokens, hidden]`; appends this step's keys and values to `kv`."""
        if self.spec.heads == 0:
            return np.zeros_like(x)
        return kernels.attention(self.spec, data, x, kv.keys[self.layer], kv.values[self.layer], batch)

    def stage(self, data: Bytes, kv: PagedKV) -> Stage:
        """The block as a part of a chain."""
        return Stage(self.spec, data, self.residual, kv.keys[self.layer], kv.values[self.layer])


@dataclass(frozen=True)
class FfnBlock:
    """This node's neurons of one layer's feed-forward network, or a tile of them: the partials of all tiles add up."""

    layer: int
    spec: FfnSpec
    residual: Residual
    complete: bool = True  # no further tile of the layer follows

    @property
    def name(self) -> str:
        """What a trace calls it."""
        return f"ffn {self.layer}"

    def partial(self, kernels: Kernels, data: Bytes, x: F32, kv: PagedKV, batch: Batch) -> F32:
        """Feed-forward output of the local neurons, `[tokens, hidden]`."""
        if self.spec.neuron.units == 0:
            return np.zeros_like(x)
        return kernels.ffn(self.spec, data, x)

    def stage(self, data: Bytes, kv: PagedKV) -> Stage:
        """The block as a part of a chain."""
        return Stage(self.spec, data, self.residual)


Block = AttentionBlock | FfnBlock


def attention_block(
    config: ModelConfig, layer: int, query: RunLayout, kv: RunLayout, vectors: Vectors, shard: Shard
) -> AttentionBlock:
    """The attention block of `layer` for the units of `shard`; `query` and `kv` are the layouts of the whole block."""
    heads = shard.query.scaled(query.width // config.head_dim, config.heads)
    kv_heads = shard.kv.scaled(kv.width // config.head_dim, config.kv_heads)
    group = config.heads // config.kv_heads
    spec = AttentionSpec(
        query=replace(query, units=len(shard.query)),
        kv=replace(kv, units=len(shard.kv)),
        heads=len(heads),
        kv_heads=len(kv_heads),
        head_dim=config.head_dim,
        kv_index=np.arange(heads.first, heads.last, dtype=np.int32) // group - kv_heads.first,
        norm=_norm(config, vectors),
        q_bias=_cut(vectors.get("q.bias"), heads, config.head_dim),
        k_bias=_cut(vectors.get("k.bias"), kv_heads, config.head_dim),
        v_bias=_cut(vectors.get("v.bias"), kv_heads, config.head_dim),
        q_norm=vectors.get("q_norm"),
        k_norm=vectors.get("k_norm"),
        inv_freq=np.asarray(config.inv_freq, np.float32),
        rope_scale=config.rope_scale,
        attention_scale=config.attention_scale,
        softcap=config.attention_softcap,
        window=config.window(layer),
    )
    return AttentionBlock(layer, spec, _residual(config, vectors, "o.bias"))


def ffn_block(config: ModelConfig, layer: int, neuron: RunLayout, vectors: Vectors, shard: Shard) -> FfnBlock:
    """The feed-forward block of `layer` for the units of `shard`; `neuron` is the layout of the whole block."""
    spec = FfnSpec(
        neuron=replace(neuron, units=len(shard.ffn)),
        activation=config.activation,
        gated=config.gated,
        norm=_norm(config, vectors),
        gate_bias=_cut(_padded(vectors.get("gate.bias"), neuron.units), shard.ffn, FFN_UNIT),
        up_bias=_cut(_padded(vectors.get("up.bias"), neuron.units), shard.ffn, FFN_UNIT),
    )
    return FfnBlock(layer, spec, _residual(config, vectors, "down.bias"))


def _norm(config: ModelConfig, vectors: Vectors) -> NormSpec:
    return NormSpec(config.norm, config.norm_eps, vectors["norm"], vectors.get("norm.bias"))


def _residual(config: ModelConfig, vectors: Vectors, bias: str) -> Residual:
    return Residual(vectors.get(bias), vectors.get("post_norm"), config.norm_eps)


def _cut(vector: F32 | None, part: Range, width: int) -> F32 | None:
    """The slice of a whole-model vector that belongs to `part`, whose items are `width` values wide."""
    return None if vector is None else np.ascontiguousarray(vector[part.first * width : part.last * width])


def _padded(vector: F32 | None, units: int) -> F32 | None:
    """A bias over neurons, padded with zeros to whole units."""
    return None if vector is None else np.pad(vector, (0, units * FFN_UNIT - len(vector)))
