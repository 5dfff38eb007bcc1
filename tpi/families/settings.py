"""Settings of families without experts: the ModelConfig fields that differ from Llama's, from a config.json.

The functions expect complete fields: `tpi.families.huggingface.defaults` has filled in the missing ones.
"""

from collections.abc import Sequence
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, activation, float_field, int_field, size_field
from tpi.families.huggingface import rope as hfrope

_KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}


def windows_of(fields: Fields, sliding: Sequence[bool]) -> dict[str, Any]:
    """Return the ModelConfig field `windows`; `sliding` is True for each layer with a sliding window.

    Return an empty dictionary if no layer has a sliding window.
    """
    if fields["sliding_window"] is None or not any(sliding):
        return {}
    window = size_field(fields, "sliding_window")
    return {"windows": tuple(window if slides else 0 for slides in sliding)}


def sliding_layers(fields: Fields, otherwise: Sequence[bool]) -> Sequence[bool]:
    """Return one bool for each layer, True if it has a sliding window.

    The values come from `layer_types`, or from `otherwise` if that field is null.

    Raises:
        ModelError: if `layer_types` has unsupported kinds, or not one entry for each layer.
    """
    kinds = fields["layer_types"]
    if kinds is None:
        return otherwise
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in map(str, kinds)):
        raise ModelError(f"layer_types {str(kinds)[:80]} are not supported; layers may be full or sliding attention")
    if len(kinds) != len(otherwise):
        raise ModelError(f"layer_types has {len(kinds)} entries for {len(otherwise)} layers")
    return [_KINDS[str(kind)] for kind in kinds]


def layer_range(fields: Fields) -> range:
    """Return the numbers of a model's layers, at most 4096."""
    return range(min(size_field(fields, "num_hidden_layers"), 1 << 12))


def bool_field(fields: Fields, key: str) -> bool:
    """Return the boolean in the field `key`.

    Raises:
        ModelError: if the field is not true or false.
    """
    if type(fields[key]) is not bool:
        raise ModelError(f"{key} is {str(fields[key])[:80]!r} in the model's configuration; true or false is expected")
    return bool(fields[key])


def mistral(fields: Fields) -> dict[str, Any]:
    """Return Mistral's fields: sliding windows in all layers or none."""
    return windows_of(fields, [True for _ in layer_range(fields)])


def ministral(fields: Fields) -> dict[str, Any]:
    """Return Ministral's fields: sliding windows in the layers that `layer_types` lists, or else in all layers."""
    return windows_of(fields, sliding_layers(fields, [True for _ in layer_range(fields)]))


def qwen2(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen2 and Qwen3: sliding windows, if used, in the listed layers or else in the last ones."""
    first = int_field(fields, "max_window_layers")
    sliding = sliding_layers(fields, [layer >= first for layer in layer_range(fields)])
    return windows_of(fields, sliding) if bool_field(fields, "use_sliding_window") else {}


def phi3(fields: Fields) -> dict[str, Any]:
    """Return Phi-3's fields: sliding windows in all layers or none; RoPE may rotate a part of each head."""
    head_dim, context = head_size(fields), size_field(fields, "max_position_embeddings")
    rope = hfrope.flat(fields, head_dim, context, partial=True)
    return rope.fields() | windows_of(fields, [True for _ in layer_range(fields)])


def gemma2(fields: Fields) -> dict[str, Any]:
    """Return Gemma 2's fields: sliding windows in every other layer, caps on scores and logits, a scaled embedding."""
    sliding = sliding_layers(fields, [layer % 2 == 0 for layer in layer_range(fields)])
    return _gemma(fields, sliding) | {"attention_softcap": float_field(fields, "attn_logit_softcapping", 0)}


def gemma3(fields: Fields) -> dict[str, Any]:
    """Return Gemma 3's fields: all layers but every sixth have a sliding window and rotary frequencies of their own.

    The cap on attention scores is ignored, as in transformers.
    """
    pattern = int_field(fields, "sliding_window_pattern")
    if pattern < 1:
        raise ModelError(f"sliding_window_pattern is {pattern}; it must be at least 1")
    sliding = sliding_layers(fields, [(layer + 1) % pattern != 0 for layer in layer_range(fields)])
    return _gemma(fields, sliding) | ropes_of_kinds(fields, sliding)


def ropes_of_kinds(fields: Fields, sliding: Sequence[bool]) -> dict[str, Any]:
    """Return the ModelConfig fields about rotary frequencies that differ between full and sliding layers.

    Raises:
        ModelError: if the kind of scaling is not supported.
    """
    full, local = hfrope.per_kind(fields, head_size(fields), size_field(fields, "max_position_embeddings"))
    if full.long or local.long:
        raise ModelError("rope scaling 'longrope' is not supported for this family")
    return {
        "inv_freq": full.inv_freq,
        "rope_scale": full.scale,
        "local_inv_freq": local.inv_freq,
        "local_rope_scale": local.scale,
        "rope_kinds": tuple(2 if slides else 1 for slides in sliding),
    }


def _gemma(fields: Fields, sliding: Sequence[bool]) -> dict[str, Any]:
    scalar = float_field(fields, "query_pre_attn_scalar")
    if scalar <= 0:
        raise ModelError(f"query_pre_attn_scalar is {scalar}; a positive number is expected")
    return {
        "activation": activation(fields["hidden_activation"]),
        "attention_scale": scalar**-0.5,
        "logit_softcap": float_field(fields, "final_logit_softcapping", 0),
        "embed_scale": size_field(fields, "hidden_size") ** 0.5,
        **windows_of(fields, sliding),
    }


def smollm3(fields: Fields) -> dict[str, Any]:
    """Return SmolLM3's fields: every fourth layer has no RoPE, and has a sliding window if these are used."""
    interval, rotates, every = (
        int_field(fields, "no_rope_layer_interval"),
        fields["no_rope_layers"],
        layer_range(fields),
    )
    if rotates is None and interval < 1:
        raise ModelError(f"no_rope_layer_interval is {interval}; it must be at least 1")
    kinds = [int((layer + 1) % interval != 0) for layer in every] if rotates is None else rotates
    if not isinstance(kinds, list) or len(kinds) < len(every) or any(kind not in (0, 1) for kind in kinds):
        raise ModelError("no_rope_layers is not a list of 0 or 1 for each layer")
    kinds = [int(kind) for kind in kinds[: len(every)]]
    slides = bool_field(fields, "use_sliding_window")
    sliding = sliding_layers(fields, [slides and not kind for kind in kinds])
    return {"rope_kinds": tuple(kinds)} | windows_of(fields, sliding)


def granite(fields: Fields) -> dict[str, Any]:
    """Return Granite's fields, with its residual multiplier m folded into others.

    Granite multiplies the output of each block by m before adding it to the hidden states. RMSNorm does not depend on
    the scale of the hidden states, so TPI stores them divided by m. The embedding is divided by m, and the epsilon of
    the norms by m^2, since it is added to the mean of squares.

    Raises:
        ModelError: if the residual multiplier or the scaling of the logits is out of range.
    """
    m, scaling = float_field(fields, "residual_multiplier"), float_field(fields, "logits_scaling")
    if not 1e-6 < m < 1e6 or not 1e-9 < abs(scaling) < 1e9:
        raise ModelError(f"residual_multiplier {m} or logits_scaling {scaling} is not supported")
    return {
        "embed_scale": float_field(fields, "embedding_multiplier") / m,
        "norm_eps": float_field(fields, "rms_norm_eps") / m**2,
        "attention_scale": float_field(fields, "attention_multiplier"),
        "logit_scale": 1 / scaling,
    }


def opt(fields: Fields) -> dict[str, Any]:
    """Return OPT's fields: LayerNorm, learned positions, ReLU without a gate.

    Raises:
        ModelError: if the model normalises after its blocks or projects its embedding, as the 350m model does.
    """
    if not fields["do_layer_norm_before"] or fields["_remove_final_layer_norm"]:
        raise ModelError("this OPT model normalises after its blocks (350m), which is not supported; take another size")
    if fields["word_embed_proj_dim"] not in (None, fields["hidden_size"]):
        raise ModelError("this OPT model projects its embedding (350m), which is not supported; take another size")
    return {
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated": False,
        "activation": activation(fields["activation_function"]),
        "intermediate": size_field(fields, "ffn_dim"),
        "inv_freq": (),
        "position_offset": 2,
    }


def head_size(fields: Fields) -> int:
    """Return the number of values of a head: `head_dim`, or else the hidden size divided by the number of heads."""
    hidden, heads = size_field(fields, "hidden_size"), size_field(fields, "num_attention_heads")
    return size_field({"head_dim": fields.get("head_dim")}, "head_dim", max(hidden // heads, 1))
