"""Settings of the families of this folder: the ModelConfig fields that differ from Llama's."""

from dataclasses import replace
from typing import Any

from tpi.families.base import BlockRefs, Fields, Model, activation, float_field, int_field, size_field
from tpi.families.huggingface import rope as hfrope
from tpi.families.settings import head_size, mistral
from tpi.sources.heads import HeadOrder


def gemma(fields: Fields) -> dict[str, Any]:
    """Return Gemma's fields: a scaled embedding, and GELU by its tanh formula, which older files call `gelu`."""
    act = fields["hidden_act"]
    return {
        "activation": "gelu_tanh" if act == "gelu" else activation(act),
        "embed_scale": size_field(fields, "hidden_size") ** 0.5,
    }


def gguf_gemma(fields: Fields) -> dict[str, Any]:
    """Return Gemma's fields from the metadata of a GGUF file: a scaled embedding, and GELU by its tanh formula."""
    return {"activation": "gelu_tanh", "embed_scale": size_field(fields, "embedding_length") ** 0.5}


def arcee(fields: Fields) -> dict[str, Any]:
    """Return Arcee's fields: squared ReLU, without a gate."""
    return {"gated": False, "activation": activation(fields["hidden_act"])}


def ministral3(fields: Fields) -> dict[str, Any]:
    """Return the fields of Ministral 3, whose queries grow with the logarithm of the position.

    They grow only beyond the original context.

    Raises:
        ModelError: if `llama_4_scaling_beta` is missing.
    """
    context, inside = size_field(fields, "max_position_embeddings"), hfrope.scaling(fields)
    rope, outside = hfrope.flat(fields, head_size(fields), context), fields["original_max_position_embeddings"]
    original = inside.get("original_max_position_embeddings") if outside is None else outside
    return (
        mistral(fields)
        | rope.fields()
        | {
            "query_growth": float_field(fields, "llama_4_scaling_beta"),
            "original_context": size_field(
                {"original_max_position_embeddings": original}, "original_max_position_embeddings", context
            ),
        }
    )


def gguf_ministral3(fields: Fields) -> dict[str, Any]:
    """Return the fields of Ministral 3 from GGUF metadata; its queries grow with the logarithm of the position."""
    context = size_field(fields, "context_length")
    return {
        "query_growth": float_field(fields, "attention.temperature_scale", 0.0),
        "original_context": int_field(fields, "rope.scaling.original_context_length", context) or context,
    }


def hunyuan(fields: Fields) -> dict[str, Any]:
    """Return Hunyuan's fields, from a config.json or GGUF metadata: queries and keys are normed after RoPE."""
    return {"late_head_norms": True}


def interleaved(model: Model, fields: Fields) -> Model:
    """Return the model, in which the two values of a rotary pair are next to each other in q and k (ERNIE)."""
    order = HeadOrder.from_interleaved(model.config.head_dim)

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind != "attention":
            return refs
        parts, vectors = (
            tuple(
                (name, replace(ref, heads=order) if name.removesuffix(".bias") in "qk" else ref) for name, ref in found
            )
            for found in (refs.parts, refs.vectors)
        )
        return replace(refs, parts=parts, vectors=vectors)

    return model.with_blocks(block)
