"""What a family sets differently from Llama: ModelConfig fields from a config.json."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, activation, count, number, whole


def _windows(fields: Fields, sliding: list[bool], default: int | None = None) -> dict[str, Any]:
    """`windows` from the sliding layers; `sliding_window` may be missing (the family's default) or null (none)."""
    if fields.get("sliding_window", default) is None or not any(sliding):
        return {}
    window = whole(fields, "sliding_window", default)
    return {"windows": tuple(window if slides else 0 for slides in sliding)}


def _listed(fields: Fields, otherwise: list[bool]) -> list[bool]:
    """Which layers slide: by `layer_types` if the configuration has them."""
    kinds = fields.get("layer_types")
    return [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else otherwise


def _layers(fields: Fields) -> range:
    return range(min(count(fields, "num_hidden_layers"), 1 << 12))


def mistral(fields: Fields) -> dict[str, Any]:
    """All layers slide."""
    return _windows(fields, [True for _ in _layers(fields)], 4096)


def qwen2(fields: Fields) -> dict[str, Any]:
    """Later layers slide, if any."""
    if not fields.get("use_sliding_window", False):
        return {}
    first = whole(fields, "max_window_layers", 28)
    return _windows(fields, _listed(fields, [layer >= first for layer in _layers(fields)]), 4096)


def qwen3(fields: Fields) -> dict[str, Any]:
    """Like Qwen 2, with heads of their own size."""
    return {"head_dim": count(fields, "head_dim", 128)} | qwen2(fields)


def phi3(fields: Fields) -> dict[str, Any]:
    """All layers slide, if any."""
    return _windows(fields, [True for _ in _layers(fields)])


def gemma2(fields: Fields) -> dict[str, Any]:
    """Every other layer slides; scores and logits are capped; the embedding is scaled."""
    return {
        "head_dim": count(fields, "head_dim", 256),
        "activation": activation(fields.get("hidden_activation") or "gelu_pytorch_tanh"),
        "attention_scale": max(number(fields, "query_pre_attn_scalar", 256), 1e-9) ** -0.5,
        "attention_softcap": number(fields, "attn_logit_softcapping", 0),
        "logit_softcap": number(fields, "final_logit_softcapping", 0),
        "embed_scale": count(fields, "hidden_size") ** 0.5,
        "tied": bool(fields.get("tie_word_embeddings", True)),
        **_windows(fields, _listed(fields, [layer % 2 == 0 for layer in _layers(fields)]), 4096),
    }


def opt(fields: Fields) -> dict[str, Any]:
    """LayerNorm, learned positions, ReLU without a gate."""
    if not fields.get("do_layer_norm_before", True) or fields.get("_remove_final_layer_norm", False):
        raise ModelError("this OPT model normalises after its blocks (350m), which is not supported; take another size")
    if fields.get("word_embed_proj_dim", fields.get("hidden_size")) != fields.get("hidden_size"):
        raise ModelError("this OPT model projects its embedding (350m), which is not supported; take another size")
    return {
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated": False,
        "activation": activation(fields.get("activation_function", "relu")),
        "intermediate": count(fields, "ffn_dim"),
        "inv_freq": (),
        "position_offset": 2,
        "tied": bool(fields.get("tie_word_embeddings", True)),
    }
