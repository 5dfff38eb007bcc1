"""Architectures that contain a text model among other parts."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields

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
