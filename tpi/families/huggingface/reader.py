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
from tpi.families.huggingface.wrappers import VISION_TENSORS, has_other_parts, unwrap
from tpi.families.refused import why_unsupported
from tpi.families.settings import head_size
from tpi.families.table import FAMILIES
from tpi.sources.fp8 import fp8_scales


def from_huggingface(fields: Fields, has: Callable[[str], bool], where: str) -> Model:
    """Return the model that a config.json describes.

    Args:
        fields: the parsed config.json.
        has: returns True if the source has a tensor of the given name.
        where: the name of the source in messages.

    Raises:
        ModelError: if the architecture or a setting is not supported, or the configuration is inconsistent.
    """
    fields = _without_quantisation(fields, where)
    try:
        text, names = unwrap(fields)
        family = _family(names)
        text = text if family.flatten is None else family.flatten(text)
        read = with_defaults(text, family.defaults)
        config = _config(family, read)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    check_config(config, where)
    assert family.names is not None
    model = map_tensors(
        config, family.names, has, family.norm_offset, fields=read, dense_layers=family.dense_layers(read)
    )
    model = family.adapt_refs(model, read)
    notes = _notes(text, family)
    if not has_other_parts(fields):
        return replace(model, notes=notes)
    left = "images are not supported: the model's text part is used, its vision part is left out"
    return replace(model, notes=(*notes, left), ignored_tensors=(*model.ignored_tensors, *VISION_TENSORS))


def _without_quantisation(fields: Fields, where: str) -> Fields:
    """Return `fields` without a `quantization_config` that the source of weights resolves.

    MXFP4 is left in: families other than gpt-oss refuse it later.

    Raises:
        ModelError: if weights are quantised in a way that is not supported; the message names it.
    """
    quantised = fields.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if not quantised or method == "mxfp4":
        return fields
    if fp8_scales(quantised):
        return {name: value for name, value in fields.items() if name != "quantization_config"}
    words = (
        [str(quantised.get(name))[:40] for name in ("quant_method", "format") if quantised.get(name)] if method else []
    )
    raise ModelError(
        f"{where} is quantised in a way that is not supported ({', '.join(words) or 'of no name'}); give the original, "
        "one in FP8, or a GGUF of it"
    )


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
    """Return the configuration for complete `fields`, in which missing ones have their defaults."""
    settings, head_dim = family.settings(fields), head_size(fields)
    heads, context = size_field(fields, "num_attention_heads"), size_field(fields, "max_position_embeddings")
    found: dict[str, Any] = {
        "family": family.name,
        "hidden": size_field(fields, "hidden_size"),
        "layers": size_field(fields, "num_hidden_layers"),
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
