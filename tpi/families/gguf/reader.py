"""Reading of a `Model` from a GGUF file."""

from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.base import Family, Fields, Model, float_field, map_tensors, size_field
from tpi.families.checks import check_config
from tpi.families.gguf.keys import Keys
from tpi.families.gguf.powerinfer import for_powerinfer, with_relu
from tpi.families.gguf.rope import from_metadata
from tpi.families.refused import why_unsupported_gguf
from tpi.families.table import FAMILIES
from tpi.sources.base import find
from tpi.sources.gguf import GgufSource


def from_gguf(source: GgufSource) -> Model:
    """Return the model in a GGUF file.

    Raises:
        ModelError: if the architecture or a setting is not supported, or the metadata is inconsistent.
    """
    family = _family(source)
    assert family.gguf is not None
    fields = Keys(source.metadata, family.gguf)
    try:
        config = _config(family, fields, source)
        config = with_relu(config) if source.powerinfer else config
        fields.check()
    except ModelError as error:
        raise ModelError(f"{source.label}: {error}") from error
    check_config(config, source.label)
    assert family.gguf_names is not None
    if source.powerinfer:
        return for_powerinfer(config, family, source)
    has = source.tensors.__contains__
    numbers = family.gguf_numbers(fields)
    model = map_tensors(
        config, family.gguf_names, has, interleaved_rope=family.interleaved_rope, dense_layers=None, numbers=numbers
    )
    return family.adapt_gguf_refs(model, has)


def _family(source: GgufSource) -> Family:
    name = source.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf is not None and family.gguf == name:
            return family
    why = f" ({text})" if (text := why_unsupported_gguf(name)) else ""
    raise ModelError(
        f"{source.label} has the architecture {name!r}{why}, which is not supported; docs/models.md lists what is"
    )


def _config(family: Family, fields: Fields, source: GgufSource) -> ModelConfig:
    hidden, heads = size_field(fields, "embedding_length"), size_field(fields, "attention.head_count")
    own = family.gguf_settings(fields)
    head_dim = own.get("head_dim") or size_field(fields, "attention.key_length", max(hidden // heads, 1))
    if "head_dim" not in own and size_field(fields, "attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different sizes are not supported")
    found: dict[str, Any] = {
        "family": family.name,
        "hidden": hidden,
        "layers": size_field(fields, "block_count"),
        "heads": heads,
        "kv_heads": own.get("kv_heads") or size_field(fields, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate": own.get("intermediate") or size_field(fields, "feed_forward_length"),
        "vocab": find(source, "token_embd.weight").rows,
        "context": size_field(fields, "context_length"),
        "norm": "rms",
        "activation": "silu",
        "gated": True,
        "tied": "output.weight" not in source.tensors,
    }
    full = own["full_heads"].head_dim if own.get("full_heads") else head_dim
    rope = from_metadata(fields, full, found["context"], source)
    if family.interleaved_rope and 2 * len(rope.inv_freq) != head_dim:
        raise ModelError(f"RoPE on {2 * len(rope.inv_freq)} of a head's {head_dim} values is not supported")
    found |= {"attention_scale": head_dim**-0.5} | rope.fields() | own
    if "norm_eps" not in found:
        found["norm_eps"] = float_field(fields, "attention.layer_norm_rms_epsilon")
    if given := float_field(fields, "attention.scale", 0.0):
        found["attention_scale"] = given
    return ModelConfig(**found)
