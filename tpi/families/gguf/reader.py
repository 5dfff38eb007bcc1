"""Reading of a `Model` from a GGUF file."""

from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.base import Family, Fields, Model, count, map_tensors, number
from tpi.families.checks import check_config
from tpi.families.gguf.keys import Keys
from tpi.families.gguf.powerinfer import for_powerinfer, rectified
from tpi.families.gguf.rope import from_metadata
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
        config = rectified(config) if source.powerinfer else config
        fields.check()
    except ModelError as error:
        raise ModelError(f"{source.label}: {error}") from error
    check_config(config, source.label)
    assert family.gguf_names is not None
    if source.powerinfer:
        return for_powerinfer(config, family, source)
    has = source.tensors.__contains__
    return family.gguf_arranged(
        map_tensors(config, family.gguf_names, has, interleaved=family.interleaved, dense=None), has
    )


def _family(source: GgufSource) -> Family:
    name = source.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf is not None and family.gguf == name:
            return family
    supported = ", ".join(family.gguf for family in FAMILIES if family.gguf)
    raise ModelError(f"{source.label} has the architecture {name!r}; supported in GGUF are {supported}")


def _config(family: Family, fields: Fields, source: GgufSource) -> ModelConfig:
    hidden, heads = count(fields, "embedding_length"), count(fields, "attention.head_count")
    own = family.gguf_settings(fields)
    head_dim = own.get("head_dim") or count(fields, "attention.key_length", max(hidden // heads, 1))
    if "head_dim" not in own and count(fields, "attention.value_length", head_dim) != head_dim:
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
        "activation": "silu",
        "gated": True,
        "tied": "output.weight" not in source.tensors,
    }
    rope = from_metadata(fields, head_dim, found["context"], source)
    if family.interleaved and 2 * len(rope.inv_freq) != head_dim:
        raise ModelError(f"a rotary embedding of {2 * len(rope.inv_freq)} of {head_dim} values is not supported")
    found |= {"attention_scale": head_dim**-0.5} | rope.fields() | own
    if "norm_eps" not in found:
        found["norm_eps"] = number(fields, "attention.layer_norm_rms_epsilon")
    if given := number(fields, "attention.scale", 0.0):
        found["attention_scale"] = given
    return ModelConfig(**found)
