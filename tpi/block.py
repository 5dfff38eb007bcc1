"""Kernel specs of the units that a node holds, made from a block's vectors and the model's configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from tpi.config import RECURRENT, Mixture, ModelConfig
from tpi.kernels.arithmetic import rms_norm
from tpi.kernels.spec import (
    AttentionSpec,
    ConvSpec,
    ExpertPiece,
    ExpertsSpec,
    FfnSpec,
    LatentSpec,
    NormSpec,
    PerLayerSpec,
    QueryLatentSpec,
    RecurrentSpec,
    Residual,
    RouterSpec,
    StackedNorms,
    WholeNorms,
)
from tpi.pack.layout import STACKED_NORMS, BlockKind, Part, RunLayout, RunName
from tpi.partition import FFN_UNIT, Range, by_expert
from tpi.stateheads import heads_spec, spread_norm

F32 = npt.NDArray[np.float32]
Vectors = Mapping[str, F32]
Joining = Literal["", "added", "stacked"]
"""How a block's result is combined with the next block's, so that both take one sum over the nodes.

"added": the two results are added; "stacked": the rows of the first come before those of the second; empty: the results
are not combined.
"""
_ONE, _NO_WEIGHT, _LEAST = np.ones(1, np.float32), np.empty(0, np.float32), np.float32(1e-30)


def embedded(config: ModelConfig, rows: F32) -> F32:
    """Return the first hidden states, `[tokens, hidden]`: the embedding's `rows`, scaled or normed as `config` says."""
    if config.embed_norm:
        return rms_norm(rows, _ONE, config.norm_eps)
    return rows if config.embed_scale == 1.0 else rows * np.float32(config.embed_scale)


def attention_spec(
    config: ModelConfig,
    layer: int,
    query: RunLayout,
    kv: RunLayout,
    vectors: Vectors,
    query_units: Range,
    kv_units: Range,
    latents: Sequence[RunLayout] = (),
) -> AttentionSpec:
    """Return the spec of the units `query_units` and `kv_units` of the attention block of `layer`.

    If the layer reads the keys of another, `kv` and `kv_units` are those of that layer.
    `query`, `kv` and `latents` are the layouts of the whole block; `latents` are the runs before the query run, in
    their order. `kv_units` must hold every KV head that a head of `query_units` attends to. A node that has heads has
    all units of the runs `latent` and `query_latent`.
    """
    found = {run.name: run for run in latents}
    config = config.at_layer(layer)
    heads = query_units.scaled(query.width // config.head_dim, config.heads)
    kv_heads = kv_units.scaled(kv.width // config.kv_width, config.kv_heads)
    group = config.heads // config.kv_heads
    inv_freq, rope_scale = config.rope(layer)
    ones = np.ones(config.head_dim, np.float32)
    return AttentionSpec(
        query=replace(query, units=len(query_units)),
        kv=replace(kv, units=0 if config.shared_kv else len(kv_units)),
        heads=len(heads),
        kv_heads=len(kv_heads),
        head_dim=config.head_dim,
        kv_index=np.arange(heads.first, heads.last, dtype=np.int32) // group - kv_heads.first,
        norm=_norm(config, vectors),
        q_bias=_cut(vectors.get("q.bias"), heads, config.head_dim),
        k_bias=_cut(vectors.get("k.bias"), kv_heads, config.head_dim),
        v_bias=_cut(vectors.get("v.bias"), kv_heads, config.head_dim),
        q_norm=vectors.get("q_norm", ones if config.plain_head_norms else None),
        k_norm=vectors.get("k_norm", ones if config.plain_head_norms else None),
        inv_freq=np.asarray(inv_freq, np.float32),
        rope_scale=rope_scale,
        attention_scale=config.attention_scale,
        softcap=config.attention_softcap,
        window=config.window(layer),
        clip=config.attention_clip,
        growth=config.query_growth,
        growth_tokens=config.original_context,
        whole=_whole_norms(config, vectors, heads, kv_heads),
        sinks=_cut(vectors.get("sinks"), heads, 1),
        latent=_latent(config, found["latent"], vectors, bool(len(query_units))) if found else None,
        query_latent=_query_latent(config, found, vectors, len(query_units)),
        output_gate=config.output_gate,
        v_norm=ones if config.value_norm else None,
        late_norms=config.late_head_norms,
        shared=bool(config.shared_kv),
    )


def recurrent_spec(config: ModelConfig, runs: Sequence[tuple[RunLayout, Range]], vectors: Vectors) -> RecurrentSpec:
    """Return the spec of the units of a recurrent block that the node holds.

    `runs` has the layout and the units of each run.
    """
    if config.state_heads is not None:
        return heads_spec(config, runs, vectors, _norm(config, vectors))
    ((values, units),) = runs
    channels = units.scaled(values.width, config.hidden)
    return ConvSpec(
        values=replace(values, units=len(units)),
        channels=len(channels),
        norm=_norm(config, vectors),
        weights=vectors["conv"].reshape(config.hidden, config.conv_taps)[channels.first : channels.last],
    )


def _latent(config: ModelConfig, run: RunLayout, vectors: Vectors, held: bool) -> LatentSpec:
    settings = config.latent
    assert settings is not None  # only models with these settings have a latent run
    norm = NormSpec("rms", settings.norm_eps, vectors["latent.norm"])
    units = run.units if held else 0
    return LatentSpec(replace(run, units=units), norm, settings.rope, config.kv_width, vectors.get("latent.bias"))


def _query_latent(
    config: ModelConfig, runs: Mapping[RunName, RunLayout], vectors: Vectors, units: int
) -> QueryLatentSpec | None:
    """Return the latent vector of queries for `units` units of query heads; None if the model has none."""
    settings = config.latent
    if settings is None or "query_latent" not in runs:
        return None
    whole = replace(runs["query_latent"], units=runs["query_latent"].units if units else 0)
    norm = NormSpec("rms", settings.norm_eps, vectors["q_latent.norm"])
    return QueryLatentSpec(whole, replace(runs["query_up"], units=units), norm, vectors.get("q_latent.bias"))


def _whole_norms(config: ModelConfig, vectors: Vectors, heads: Range, kv_heads: Range) -> WholeNorms | None:
    """Return the norms over all heads; None if the model has none.

    If several nodes hold a KV head, only the node with the first of its query heads counts it.
    """
    q, k = vectors.get("q_norm.whole"), vectors.get("k_norm.whole")
    if q is None or k is None:
        return None
    size, group = config.head_dim, config.heads // config.kv_heads
    first = np.arange(kv_heads.first, kv_heads.last) * group
    counted = (heads.first <= first) & (first < heads.last)
    own_q, own_k = _cut(q, heads, size), _cut(k, kv_heads, size)
    assert own_q is not None and own_k is not None  # noqa: PT018 - both exist
    return WholeNorms(own_q, own_k, counted, config.heads * size, config.kv_heads * size)


def ffn_spec(config: ModelConfig, neuron: RunLayout, vectors: Vectors, units: Range) -> FfnSpec:
    """Return the spec of some units of a feed-forward block. `neuron` is the layout of the whole block."""
    return FfnSpec(
        neuron=replace(neuron, units=len(units)),
        activation=config.activation,
        gated=config.gated,
        norm=_norm(config, vectors),
        gate_bias=_cut(_padded(vectors.get("gate.bias"), neuron.units), units, FFN_UNIT),
        up_bias=_cut(_padded(vectors.get("up.bias"), neuron.units), units, FFN_UNIT),
        threshold=config.activation_threshold,
        slope=config.activation_slope,
    )


def experts_spec(
    config: ModelConfig,
    neuron: RunLayout,
    units: Sequence[Range],
    shared: tuple[RunLayout, Range] | None,
    vectors: Vectors,
) -> ExpertsSpec:
    """Return the spec of some units of a block of experts.

    `neuron` is the layout of the block's routed experts; `units` are ranges of it, in the order of their weights in
    memory. `shared` is the layout of the shared experts and the range of it that the node holds.
    """
    mixture = config.mixture
    assert mixture is not None  # a model with blocks of experts has these settings
    each = neuron.units // mixture.experts
    norm, weight = _norm(config, vectors), vectors["router"].reshape(mixture.experts, config.hidden)
    if (scale := vectors.get("router.norm")) is not None:
        norm, weight = _with_router(norm, weight, scale)
    shared_spec = None
    if shared is not None and len(shared[1]):
        shared_spec = _neurons(config, shared[0], shared[1], norm)
    pieces = [piece for part in units for piece in by_expert(part, each)]
    router = RouterSpec(
        mixture=mixture,
        norm=norm,
        weight=weight,
        bias=vectors.get("router.bias"),
        choice=vectors.get("router.choice"),
        shared=vectors.get("shared.scale"),
        factors=vectors.get("router.factors"),
    )
    gate, up = (_of_pieces(vectors.get(f"{name}.biases"), mixture, each, pieces) for name in ("gate", "up"))
    down = vectors.get("down.biases")
    routed = _neurons(config, neuron, Range(0, sum(len(part) for _, part in pieces)), norm)
    return ExpertsSpec(
        routed=replace(routed, gate_bias=gate, up_bias=up),
        pieces=tuple(ExpertPiece(expert, len(part), part.first == expert * each) for expert, part in pieces),
        shared=shared_spec,
        router=router,
        down_bias=None if down is None else down.reshape(mixture.experts, config.hidden),
    )


def _with_router(norm: NormSpec, weight: F32, scale: F32) -> tuple[NormSpec, F32]:
    """Return the norm of experts, and the weight of their router for inputs after that norm (Gemma 4).

    The router has a norm of its own, with the weights `scale / sqrt(hidden)`. It differs from the experts' norm only in
    the weights. So the router's weight is multiplied by the ratio of the two norms' weights. Weights of the experts'
    norm that are 0 become `_LEAST`, which is small enough to be 0 to the experts.
    """
    own = np.where(np.abs(norm.weight) < _LEAST, _LEAST, norm.weight)
    factors = scale * np.float32(len(scale) ** -0.5) / own
    return replace(norm, weight=own), np.ascontiguousarray(weight * factors, np.float32)


def _neurons(config: ModelConfig, neuron: RunLayout, units: Range, norm: NormSpec) -> FfnSpec:
    """Return the spec of the neurons in `units`, whose layout is `neuron`. It has no biases."""
    run, numbers = replace(neuron, units=len(units)), (config.activation_threshold, config.activation_slope)
    return FfnSpec(run, config.activation, config.gated, norm, None, None, *numbers)


def _of_pieces(bias: F32 | None, mixture: Mixture, each: int, pieces: Sequence[tuple[int, Range]]) -> F32 | None:
    """Return the biases of the neurons in `pieces`, cut from the biases of all experts, or None without biases.

    The biases of each expert are first padded with zeros to `each` units.
    """
    if bias is None:
        return None
    padded = np.pad(bias.reshape(mixture.experts, -1), ((0, 0), (0, each * FFN_UNIT - mixture.width)))
    units = padded.reshape(mixture.experts * each, FFN_UNIT)
    return np.concatenate([units[part.first : part.last].reshape(-1) for _, part in pieces] or [units[:0, 0]])


def residual(config: ModelConfig, kind: BlockKind, vectors: Vectors, layer: int = 0) -> Residual:
    """Return the operations that follow the sum of a block of this kind in `layer`, such as adding its bias."""
    bias = "o.bias" if kind == "attention" or kind in RECURRENT else "down.bias"
    weight = vectors.get("post_norm")
    eps = config.norm_eps if config.post_norm_eps is None else config.post_norm_eps
    norm = None if weight is None else NormSpec("rms", eps, weight)
    stacked = None
    if config.parallel_experts and kind == "experts":
        stacked = StackedNorms(*(NormSpec("rms", config.norm_eps, vectors[name]) for name in STACKED_NORMS))
    spread = spread_norm(config) if kind == "mamba" else None
    scale = float(vectors.get("layer_scale", _ONE)[0])
    if "per_layer.gate" in vectors:
        return Residual(vectors.get(bias), norm, 1.0, stacked, spread, _per_layer(config, vectors, layer, scale))
    return Residual(vectors.get(bias), norm, scale, stacked, spread)


def _per_layer(config: ModelConfig, vectors: Vectors, layer: int, scale: float) -> PerLayerSpec:
    """Return the spec of the end of `layer`, which adds each token's embedding for this layer to the hidden states.

    The hidden states are then multiplied by `scale`.
    """
    run = RunLayout("row", "record", (Part("row", "f32", "row"),), 1, config.hidden, config.per_layer)
    return PerLayerSpec(
        gate=vectors["per_layer.gate"].reshape(config.per_layer, config.hidden),
        projection=vectors["per_layer.projection"].reshape(config.hidden, config.per_layer),
        norm=NormSpec("rms", config.norm_eps, vectors["per_layer.norm"]),
        activate=_neurons(replace(config, gated=False), run, Range(0, run.units), NormSpec("none", 0.0, _NO_WEIGHT)),
        first=layer * config.per_layer,
        scale=scale,
    )


def joining(config: ModelConfig, kind: BlockKind) -> Joining:
    """Return how the result of a block of this kind and the result of the layer's next block share one sum.

    Return an empty string if they do not share one.
    """
    if config.parallel_experts and kind == "ffn":
        return "stacked"
    return "added" if config.parallel and kind == "attention" else ""


def join(how: Joining, first: F32, second: F32) -> F32:
    """Return the results of two blocks that share one sum, added or stacked as `how` says.

    The result is `[tokens, hidden]`, or `[2 * tokens, hidden]` if stacked.
    """
    return np.concatenate([first, second]) if how == "stacked" else first + second


def _norm(config: ModelConfig, vectors: Vectors) -> NormSpec:
    if not config.input_norm:
        return NormSpec("none", config.norm_eps, _NO_WEIGHT)
    return NormSpec(config.norm, config.norm_eps, vectors["norm"], vectors.get("norm.bias"))


def _cut(vector: F32 | None, part: Range, width: int) -> F32 | None:
    """Return the part of a whole model's vector that belongs to the units `part`, each of which has `width` values."""
    return None if vector is None else np.ascontiguousarray(vector[part.first * width : part.last * width])


def _padded(vector: F32 | None, units: int) -> F32 | None:
    return None if vector is None else np.pad(vector, (0, units * FFN_UNIT - len(vector)))
