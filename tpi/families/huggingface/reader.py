"""Reading of a `Model` from a config.json."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.base import Family, Fields, Model, activation, float_field, map_tensors, size_field
from tpi.families.checks import check_config
from tpi.families.huggingface import rope as hfrope
from tpi.families.huggingface.defaults import unread, with_defaults
from tpi.families.refused import why_unsupported
from tpi.families.settings import head_size
from tpi.families.table import FAMILIES
from tpi.sources.quantised.source import MLX, method_of, without_quantisation

# Architecture to the architectures of its text part, by the part's model_type (None if the field is missing).
_WRAPPERS: dict[str, dict[str | None, str]] = {
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM", None: "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {
        "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
        None: "Gemma4UnifiedForCausalLM",
    },
    "MuseGlimmerForConditionalGeneration": {
        "muse_glimmer_text": "MuseGlimmerForConditionalGeneration", None: "MuseGlimmerForConditionalGeneration",
    },
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM", None: "Gemma3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM", None: "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", None: "Qwen3_5MoeForCausalLM"},
    "KimiK25ForConditionalGeneration": {
        "kimi_k2": "DeepseekV3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", None: "DeepseekV3ForCausalLM",
    },
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM",
                                         "ministral3": "Ministral3ForCausalLM"},
}  # fmt: skip
# Tensors of the other parts.
VISION_TENSORS = (
    "vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*",
    "model.visual.*", "visual.*", "model.audio_tower.*", "model.embed_audio.*", "model.embed_vision.*",
    "mm_projector.*", "model.vision_adapter.*", "model.vision_projection.*",
)  # fmt: skip


def unwrap(fields: Fields) -> tuple[Fields, list[str]]:
    """Return the fields of the text model and the names of its architectures.

    If the model is not a wrapper around a text model, these are `fields` and its `architectures`.

    Raises:
        ModelError: if the text part is missing or of a type that is not supported.
    """
    listed = fields.get("architectures")
    names = [str(name)[:80] for name in listed][:8] if isinstance(listed, list) else []
    wrapper = next((name for name in names if name in _WRAPPERS), None)
    if wrapper is None:
        return fields, names
    text: Any = fields.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"the configuration of this {wrapper} has no text_config, so its text part is not known")
    kinds, kind = _WRAPPERS[wrapper], text.get("model_type")
    if (kind is not None and not isinstance(kind, str)) or kind not in kinds:
        raise ModelError(f"the text part of this {wrapper} is of type {str(kind)[:80]!r}, which is not supported")
    tied = {name: fields[name] for name in ("tie_word_embeddings", "quantization_config") if name in fields}
    return {**text, **tied}, [kinds[kind]]


def has_other_parts(fields: Fields) -> bool:
    """Return True if these fields describe a text model together with other parts."""
    listed = fields.get("architectures")
    return isinstance(listed, list) and any(str(name)[:80] in _WRAPPERS for name in listed[:8])


def from_huggingface(fields: Fields, has: Callable[[str], bool], where: str) -> Model:
    """Return the model that a config.json describes.

    Args:
        fields: the parsed config.json.
        has: returns True if the source has a tensor of the given name.
        where: the name of the source in messages.

    Raises:
        ModelError: if the architecture or a setting is not supported, or the configuration is inconsistent.
    """
    mlx = MLX in fields
    try:
        method = method_of(fields)
        fields = without_quantisation(fields, method)
        text, names = unwrap(fields)
        family = _family(names)
        text = text if family.flatten is None else family.flatten(text)
        read = with_defaults(text, family.defaults)
        config = _config(family, read)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    check_config(config, where)
    assert family.names is not None
    offset = 0.0 if mlx and config.delta else family.norm_offset  # MLX stores 1 + w for these models
    dense, numbers = family.dense_layers(read), family.numbers(read)
    model = map_tensors(config, family.names, has, offset, fields=read, dense_layers=dense, numbers=numbers)
    model = family.adapt_refs(model, read)
    notes = (*_notes(text, family), *(method.notes if method else ()))
    if not has_other_parts(fields):
        return replace(model, notes=notes)
    left = "images are not supported: the model's text part is used, its vision part is left out"
    return replace(model, notes=(*notes, left), ignored_tensors=(*model.ignored_tensors, *VISION_TENSORS))


def _family(wanted: list[str]) -> Family:
    for family in FAMILIES:
        if any(name in family.architectures for name in wanted):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    why = next((f" ({text})" for text in map(why_unsupported, wanted) if text), "")
    raise ModelError(f"the architecture {', '.join(wanted) or 'none'} is not supported{why}; supported are {supported}")


def _notes(fields: Fields, family: Family) -> tuple[str, ...]:
    """Return a note that names the fields that are ignored, if there are any."""
    rotates, partial = "rope_theta" in family.defaults, bool(family.defaults.get("partial_rotary_factor"))
    names = unread(fields, family.defaults) + (hfrope.unread(fields, partial) if rotates else [])
    if not names:
        return ()
    shown = ", ".join(name[:80] for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (f"fields of its config.json that mean nothing for {family.name} models are ignored: {shown}",)


def _config(family: Family, fields: Fields) -> ModelConfig:
    """Return the configuration for complete `fields`, in which missing fields have their defaults."""
    settings, head_dim = family.settings(fields), head_size(fields)
    heads, context = size_field(fields, "num_attention_heads"), size_field(fields, "max_position_embeddings")
    found: dict[str, Any] = {
        "family": family.name,
        "hidden": size_field(fields, "hidden_size"),
        "layers": settings.get("layers") or size_field(fields, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": size_field(
            {"num_key_value_heads": fields.get("num_key_value_heads")}, "num_key_value_heads", heads
        ),
        "head_dim": head_dim,
        "vocab": size_field(fields, "vocab_size"),
        "context": context,
        "norm": "rms",
        "gated": True,
        "attention_scale": head_dim**-0.5,
        "tied": bool(fields["tie_word_embeddings"]),
    }
    if "intermediate" not in settings:
        found["intermediate"] = size_field(fields, "intermediate_size")
    if "norm_eps" not in settings:
        found["norm_eps"] = float_field(fields, "rms_norm_eps")
    if "activation" not in settings:
        found["activation"] = activation(fields["hidden_act"])
    if "inv_freq" not in settings:
        found |= hfrope.flat(fields, head_dim, context).fields()
    return ModelConfig(**(found | settings))
