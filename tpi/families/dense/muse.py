"""Muse Glimmer: a normed embedding, heads normed without weights, an output gate, post-norms with another epsilon."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Family, Fields, Model, activation, float_field
from tpi.families.gguf.settings import check_local_base, sliding_pattern
from tpi.families.huggingface import rope as hfrope
from tpi.families.huggingface.defaults import COMMON
from tpi.families.names import (
    GEMMA2_ATTENTION,
    GEMMA2_FFN,
    GGUF_GEMMA_ATTENTION,
    GGUF_GEMMA_FFN,
    GGUF_HEAD_NORMS,
)
from tpi.families.settings import head_size, layer_range, sliding_layers, windows_of
from tpi.families.sharednames import gguf_names, llama_names

_PERIOD = 4  # counted from the last layer, which has full attention and no RoPE
_GGUF_POST_EPS = 1e-8  # llama.cpp's, which files do not record
_EMBEDDING: dict[str, Any] = {"embed_norm": True, "output_gate": True}
DEFAULTS: dict[str, Any] = {name: default for name, default in COMMON.items() if name != "hidden_act"} | {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_activation": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 2048,
    "layer_types": None, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8, "layer_rope_theta": None,
}  # fmt: skip


def _settings(fields: Fields) -> dict[str, Any]:
    """Return the fields of a ModelConfig from those of the text model.

    The factor of normed queries, `qk_scale_factor`, is folded into the scale of attention scores.

    Raises:
        ModelError: if a setting is not supported.
    """
    scale, cap = float_field(fields, "qk_scale_factor"), float_field(fields, "final_logit_softcapping")
    if cap <= 0:
        raise ModelError(f"final_logit_softcapping is {cap}; a positive number is expected")
    default = [bool(layer % _PERIOD) for layer in reversed(layer_range(fields))]
    return (
        _EMBEDDING
        | windows_of(fields, sliding_layers(fields, default))
        | {
            "activation": activation(fields["hidden_activation"]),
            "attention_scale": head_size(fields) ** -0.5 * scale,
            "plain_head_norms": True,
            "post_norm_eps": float_field(fields, "post_norm_eps"),
            "logit_scale": float_field(fields, "output_multiplier"),
            "logit_softcap": cap,
            "rope_kinds": _rotated(fields, default),
        }
    )


def _rotated(fields: Fields, otherwise: list[bool]) -> tuple[int, ...]:
    """Return 1 for each layer with RoPE and 0 for each other layer.

    Without `layer_rope_theta`, the layers in `otherwise` that are True have RoPE.

    Raises:
        ModelError: if layers differ in their rotary base, or there is not one entry for each layer.
    """
    bases = fields["layer_rope_theta"]
    if bases is None:
        return tuple(map(int, otherwise))
    base = hfrope.scaling(fields).get("rope_theta", fields["rope_theta"])
    if not isinstance(bases, list) or len(bases) != len(otherwise) or any(one not in (0, base) for one in bases):
        raise ModelError(f"layer_rope_theta is {str(bases)[:80]}; 0 or {base} for each layer is expected")
    return tuple(int(one != 0) for one in bases)


def _gguf(fields: Fields) -> dict[str, Any]:
    """Return the fields of a ModelConfig from the metadata of a GGUF file, whose norms of heads have weights."""
    check_local_base(fields)
    sliding, window = sliding_pattern(fields, _PERIOD), fields.get("attention.sliding_window") or 0
    return _EMBEDDING | {
        "windows": tuple(window if slides else 0 for slides in sliding) if window else (),
        "rope_kinds": tuple(map(int, sliding)),
        "post_norm_eps": _GGUF_POST_EPS,
        "logit_scale": float_field(fields, "logit_scale"),
        "logit_softcap": float_field(fields, "final_logit_softcapping", 0.0),
    }


def _plain_final(model: Model, fields: Fields | Callable[[str], bool]) -> Model:
    """Return the model with a final norm whose weights are read as stored, without the offset of the layers' norms."""
    vectors = tuple((name, replace(ref, add=0.0)) for name, ref in model.final.vectors)
    return replace(model, final=replace(model.final, vectors=vectors))


MUSE = Family(
    "museglimmer",
    architectures=("MuseGlimmerForConditionalGeneration",),
    gguf="muse-glimmer",
    names=llama_names(GEMMA2_ATTENTION | {"gate": "layers.{i}.self_attn.gate_proj.weight"}, GEMMA2_FFN),
    gguf_names=gguf_names(
        GGUF_GEMMA_ATTENTION | GGUF_HEAD_NORMS | {"gate": "blk.{i}.attn_gate.weight"}, GGUF_GEMMA_FFN, factors=()
    ),
    defaults=DEFAULTS,
    settings=_settings,
    gguf_settings=_gguf,
    norm_offset=1.0,
    interleaved_rope=True,
    adapt_refs=_plain_final,
)
