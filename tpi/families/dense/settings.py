"""Settings of the families of this folder: the ModelConfig fields that differ from Llama's."""

from dataclasses import replace
from typing import Any

from tpi.families.base import BlockRefs, Fields, Model, activation, size_field
from tpi.sources.heads import HeadOrder


def gemma(fields: Fields) -> dict[str, Any]:
    """Return Gemma's fields: a scaled embedding, and GELU by its tanh formula, which older files call `gelu`."""
    act = fields["hidden_act"]
    return {
        "activation": "gelu_tanh" if act == "gelu" else activation(act),
        "embed_scale": size_field(fields, "hidden_size") ** 0.5,
    }


def gguf_gemma(fields: Fields) -> dict[str, Any]:
    """Return the same from the metadata of a GGUF file."""
    return {"activation": "gelu_tanh", "embed_scale": size_field(fields, "embedding_length") ** 0.5}


def arcee(fields: Fields) -> dict[str, Any]:
    """Return Arcee's fields: squared ReLU, without a gate."""
    return {"gated": False, "activation": activation(fields["hidden_act"])}


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

    return replace(model, layers=tuple(tuple(map(block, layer)) for layer in model.layers))
