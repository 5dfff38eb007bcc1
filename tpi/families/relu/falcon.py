"""The Falcon family: parallel attention and feed-forward blocks, and one tensor for queries, keys and values.

In the newer architecture, that tensor holds for each KV head its query heads, then its key, then its value. The older
architecture does the same if each query head has a KV head. If the model has a single KV head, the tensor holds all
queries, the key, then the value.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Family, Fields, Model, Names, Ref, activation, float_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.settings import head_size
from tpi.sources.heads import HeadOrder

_QKV = "h.{i}.self_attention.query_key_value."
_ATTENTION = {
    "norm": "h.{i}.input_layernorm.weight",
    "norm.bias": "h.{i}.input_layernorm.bias",
    "o": "h.{i}.self_attention.dense.weight",
    "o.bias": "h.{i}.self_attention.dense.bias?bias",
    **{part: f"{_QKV}weight[{part}]" for part in "qkv"},
    **{f"{part}.bias": f"{_QKV}bias[{part}]?bias" for part in "qkv"},
}
_FFN = {
    "norm": "h.{i}.post_attention_layernorm.weight",
    "norm.bias": "h.{i}.post_attention_layernorm.bias",
    "up": "h.{i}.mlp.dense_h_to_4h.weight",
    "down": "h.{i}.mlp.dense_4h_to_h.weight",
    "up.bias": "h.{i}.mlp.dense_h_to_4h.bias?bias",
    "down.bias": "h.{i}.mlp.dense_4h_to_h.bias?bias",
}
_GGUF_ATTENTION = {
    "norm": "blk.{i}.attn_norm.weight",
    "norm.bias": "blk.{i}.attn_norm.bias",
    "o": "blk.{i}.attn_output.weight",
    **{part: f"blk.{{i}}.attn_qkv.weight[{part}]" for part in "qkv"},
}
_GGUF_FFN = {
    "norm": "blk.{i}.attn_norm.weight",
    "norm.bias": "blk.{i}.attn_norm.bias",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "n_embed": None,
    "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None, "alibi": False,
    "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
    "max_position_embeddings": 2048, "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True,
    "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}  # fmt: skip


def _settings(fields: Fields) -> dict[str, Any]:
    """Return Falcon's fields: LayerNorm, no gate, and the shape of the heads.

    Raises:
        ModelError: for ALiBi, biases with parallel blocks, and combinations that transformers cannot run either.
    """
    if fields["alibi"]:
        raise ModelError("alibi is true in the model's configuration; ALiBi is not supported")
    newer, parallel = bool(fields["new_decoder_architecture"]), bool(fields["parallel_attn"])
    if newer and not parallel:
        raise ModelError("new_decoder_architecture without parallel_attn is not supported")
    if _norms(fields) == 2 and not (newer and parallel):
        raise ModelError("num_ln_in_parallel_attn is 2 without new_decoder_architecture, which is not supported")
    if parallel and fields["bias"]:
        raise ModelError("bias is true with parallel_attn in the model's configuration, which is not supported")
    if fields["n_embed"] not in (None, fields["hidden_size"]):
        raise ModelError("n_embed differs from hidden_size in the model's configuration")
    heads, hidden = size_field(fields, "num_attention_heads"), size_field(fields, "hidden_size")
    if hidden % heads:
        raise ModelError(f"hidden_size is {hidden}, not a multiple of {heads} heads")
    rope = hfrope.flat(fields, head_size(fields), size_field(fields, "max_position_embeddings"))
    given = {"ffn_hidden_size": fields["ffn_hidden_size"]}
    return rope.fields() | {
        "kv_heads": _kv_heads(fields, heads, newer),
        "intermediate": size_field(given, "ffn_hidden_size", 4 * hidden),
        "norm": "layer",
        "norm_eps": float_field(fields, "layer_norm_epsilon"),
        "gated": False,
        "activation": activation(fields["activation"]),
        "parallel": parallel,
    }


def _kv_heads(fields: Fields, heads: int, newer: bool) -> int:
    given = size_field({"num_kv_heads": fields["num_kv_heads"]}, "num_kv_heads", heads)
    if newer:
        return given
    if not fields["multi_query"] and given != heads:
        raise ModelError(f"num_kv_heads is {given} for {heads} heads without new_decoder_architecture or multi_query")
    return 1 if fields["multi_query"] else heads


def _norms(fields: Fields) -> int:
    """Return the number of norms (1 or 2) of a layer whose attention and feed-forward blocks are parallel."""
    default = 2 if fields["new_decoder_architecture"] else 1
    return size_field({"num": fields["num_ln_in_parallel_attn"]}, "num", default)


def _adapt_refs(model: Model, fields: Fields) -> Model:
    """Return the model with the names of its norms and the rows of queries, keys and values set in its references."""
    norms = {"attention": "input_layernorm", "ffn": "post_attention_layernorm"}
    if model.config.parallel:
        two = _norms(fields) == 2
        norms = {"attention": "ln_attn", "ffn": "ln_mlp"} if two else dict.fromkeys(norms, "input_layernorm")
    group = model.config.heads // model.config.kv_heads
    apart = fields["multi_query"] and not fields["new_decoder_architecture"]
    orders = {} if apart else _orders(group, model.config.head_dim)

    def block(refs: BlockRefs) -> BlockRefs:
        parts = tuple((name, _ordered(ref, orders.get(name))) for name, ref in refs.parts)
        vectors = tuple((name, _ordered(ref, orders.get(name[0]))
                         if name[1:] == ".bias" and name[0] in "qkv" else _normed(ref, norms[refs.kind]))
                        for name, ref in refs.vectors)  # fmt: skip
        return replace(refs, parts=parts, vectors=vectors)

    return replace(model, layers=tuple(tuple(map(block, blocks)) for blocks in model.layers))


def _orders(group: int, size: int) -> dict[str, HeadOrder]:
    """Return the order of q, k and v in the fused tensor: for each KV head its queries, its key, then its value.

    `group` is the number of query heads for each KV head; `size` is the number of values of a head.
    """
    rows = {"q": (0, group), "k": (group, group + 1), "v": (group + 1, group + 2)}
    return {
        name: HeadOrder((group + 2) * size, tuple(range(first * size, last * size)))
        for name, (first, last) in rows.items()
    }


def _ordered(ref: Ref, order: HeadOrder | None) -> Ref:
    return ref if order is None or ref.rows is None else replace(ref, rows=None, heads=order)


def _normed(ref: Ref, norm: str) -> Ref:
    layer, _, last = ref.tensor.rpartition(".")
    return replace(ref, tensor=f"{layer.rpartition('.')[0]}.{norm}.{last}") if "layernorm" in layer else ref


def _gguf_settings(fields: Fields) -> dict[str, Any]:
    """Return the fields of a Falcon in a GGUF file, whose blocks are always parallel."""
    return {
        "norm": "layer",
        "norm_eps": float_field(fields, "attention.layer_norm_epsilon"),
        "gated": False,
        "activation": "gelu_tanh",  # llama.cpp's gelu
        "parallel": True,
    }


def _adapt_gguf_refs(model: Model, has: Callable[[str], bool]) -> Model:
    """Return the model with the second norm of a layer, if it exists, as the norm of its attention."""

    def block(layer: int, refs: BlockRefs) -> BlockRefs:
        if refs.kind != "attention" or not has(f"blk.{layer}.attn_norm_2.weight"):
            return refs
        vectors = (
            (name, replace(ref, tensor=ref.tensor.replace("attn_norm.", "attn_norm_2."))) for name, ref in refs.vectors
        )
        return replace(refs, vectors=tuple(vectors))

    layers = (tuple(block(layer, refs) for refs in blocks) for layer, blocks in enumerate(model.layers))
    return replace(model, layers=tuple(layers))


FALCON = Family(
    "falcon",
    architectures=("FalconForCausalLM",),
    names=Names(
        "word_embeddings.weight",
        _ATTENTION,
        _FFN,
        {"norm": "ln_f.weight", "norm.bias": "ln_f.bias"},
        "lm_head.weight",
        prefixes=("transformer.", ""),
        ignored_tensors=("*.rotary_emb.inv_freq",),
    ),
    gguf="falcon",
    gguf_names=Names(
        "token_embd.weight",
        _GGUF_ATTENTION,
        _GGUF_FFN,
        {"norm": "output_norm.weight", "norm.bias": "output_norm.bias"},
        "output.weight",
    ),
    gguf_settings=_gguf_settings,
    adapt_gguf_refs=_adapt_gguf_refs,
    defaults=DEFAULTS,
    settings=_settings,
    adapt_refs=_adapt_refs,
)
