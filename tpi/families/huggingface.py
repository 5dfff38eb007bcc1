"""From a config.json to a `Model`."""

from collections.abc import Callable
from typing import Any

from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.base import Family, Fields, Model, activation, count, map_tensors, number
from tpi.families.checks import check_config
from tpi.families.rope import from_parameters
from tpi.families.table import FAMILIES


def from_huggingface(fields: Fields, has: Callable[[str], bool], where: str) -> Model:
    """The model that a config.json describes.

    Args:
        fields: the parsed config.json.
        has: whether the source has a tensor of this name.
        where: what to call the source in messages.

    Raises:
        ModelError: if the architecture or a variant of it is not supported, or the configuration makes no sense.
    """
    family = _family(fields, where)
    if fields.get("quantization_config"):
        raise ModelError(f"{where} is quantised in a way that is not supported; give the original, or a GGUF of it")
    try:
        config = _config(family, fields)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    check_config(config, where)
    assert family.names is not None
    return map_tensors(config, family.names, has, family.fold)


def _family(fields: Fields, where: str) -> Family:
    names = fields.get("architectures")
    wanted = [str(name) for name in names] if isinstance(names, list) else []
    for family in FAMILIES:
        if any(name in family.architectures for name in wanted):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"{where} has the architecture {', '.join(wanted) or 'none'}; supported are {supported}")


def _config(family: Family, fields: Fields) -> ModelConfig:
    settings = family.settings(fields)
    hidden, heads = count(fields, "hidden_size"), count(fields, "num_attention_heads")
    context = count(fields, "max_position_embeddings")
    head_dim = settings.get("head_dim") or count(fields, "head_dim", max(hidden // heads, 1))
    found: dict[str, Any] = {
        "family": family.name,
        "hidden": hidden,
        "layers": count(fields, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": count(fields, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab": count(fields, "vocab_size"),
        "context": context,
        "norm": "rms",
        "gated": True,
        "attention_scale": head_dim**-0.5,
        "tied": bool(fields.get("tie_word_embeddings", False)),
    }
    if "intermediate" not in settings:
        found["intermediate"] = count(fields, "intermediate_size")
    if "norm_eps" not in settings:
        found["norm_eps"] = number(fields, "rms_norm_eps", 1e-6)
    if "activation" not in settings:
        found["activation"] = activation(fields.get("hidden_act", "silu"))
    if "inv_freq" not in settings:
        found |= from_parameters(fields, head_dim, context).fields()
    return ModelConfig(**(found | settings))
