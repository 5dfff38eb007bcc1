"""From the metadata of a GGUF file to a `Model`."""

from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families import rope
from tpi.families.base import Family, Fields, Model, count, map_tensors, number, whole
from tpi.families.checks import check_config
from tpi.families.table import FAMILIES
from tpi.pack.sources.base import find, read_vector
from tpi.pack.sources.gguf import GgufSource


def from_gguf(source: GgufSource) -> Model:
    """The model that a GGUF file holds.

    Raises:
        ModelError: if the architecture is not supported, or the metadata makes no sense.
    """
    family = _family(source)
    prefix = f"{family.gguf}."
    fields = {key.removeprefix(prefix): value for key, value in source.metadata.items() if key.startswith(prefix)}
    if fields.get("expert_count"):
        raise ModelError(f"{source.label} is a mixture of experts, which is not supported; give a dense model")
    try:
        config = _config(family, fields, source)
    except ModelError as error:
        raise ModelError(f"{source.label}: {error}") from error
    check_config(config, source.label)
    assert family.gguf_names is not None
    return map_tensors(config, family.gguf_names, source.tensors.__contains__, interleaved=family.interleaved)


def _family(source: GgufSource) -> Family:
    name = source.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf is not None and family.gguf == name:
            return family
    supported = ", ".join(family.gguf for family in FAMILIES if family.gguf)
    raise ModelError(f"{source.label} has the architecture {name!r}; supported in GGUF are {supported}")


def _config(family: Family, fields: Fields, source: GgufSource) -> ModelConfig:
    hidden, heads = count(fields, "embedding_length"), count(fields, "attention.head_count")
    head_dim = count(fields, "attention.key_length", max(hidden // heads, 1))
    if count(fields, "attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different sizes are not supported")
    found: dict[str, Any] = {
        "family": family.name,
        "hidden": hidden,
        "layers": count(fields, "block_count"),
        "heads": heads,
        "kv_heads": count(fields, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate": count(fields, "feed_forward_length"),
        "vocab": find(source, "token_embd.weight").rows,
        "context": count(fields, "context_length"),
        "norm": "rms",
        "norm_eps": number(fields, "attention.layer_norm_rms_epsilon"),
        "activation": "silu",
        "gated": True,
        "attention_scale": head_dim**-0.5,
        "tied": "output.weight" not in source.tensors,
    }
    found |= _rope(fields, head_dim, found["context"], source).fields()
    return ModelConfig(**(found | family.gguf_settings(fields)))


def _rope(fields: Fields, head_dim: int, context: int, source: GgufSource) -> rope.Rope:
    """RoPE from `rope.*`, or from the factors that the file holds as tensors (Llama 3.1, Phi-3)."""
    base = rope.frequencies(number(fields, "rope.freq_base", 10000.0), whole(fields, "rope.dimension_count", head_dim))
    kind = fields.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in source.tensors:
        return rope.divided(base, read_vector(source, "rope_freqs.weight"))
    scaling = {
        "factor": fields.get("rope.scaling.factor"),
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
        "attention_factor": fields.get("rope.scaling.attn_factor"),
    }
    if "rope_factors_short.weight" in source.tensors:
        del scaling["factor"]
        return rope.longrope(
            base, scaling | {"short_factor": read_vector(source, "rope_factors_short.weight")}, context
        )
    if kind == "none":
        return rope.plain(base)
    return rope.scaled(kind, base, number(fields, "rope.freq_base", 10000.0), scaling, context)
