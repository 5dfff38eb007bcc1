"""Rotary frequencies from a config.json, whose fields are resolved as in transformers.

The object `rope_scaling` takes precedence over the object `rope_parameters`. Values that are in neither come from the
top-level fields `rope_theta`, `partial_rotary_factor` and `original_max_position_embeddings`. The last of these takes
precedence even over the value in an object.
"""

from typing import Any

import numpy as np

from tpi.errors import ModelError
from tpi.families.base import Fields, float_field, size_field
from tpi.families.rope import Rope, frequencies, plain, scaled

_SCALED = ("llama3", "yarn", "longrope")  # kinds of scaling that have an original context


def flat(fields: Fields, head_dim: int, context: int, partial: bool = False) -> Rope:
    """Return the rotary frequencies of a model whose layers all use the same ones.

    Args:
        fields: the complete fields of a config.json.
        head_dim: the number of values of a head.
        context: the model's context, in tokens.
        partial: True if the family can rotate a part of each head (Phi-3).

    Raises:
        ModelError: if the kind of scaling is not supported, or it differs between layers.
    """
    found = object_of(fields, "rope_scaling") or object_of(fields, "rope_parameters")
    nested = [str(name) for name, value in found.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(f"rotary embeddings of their own for {', '.join(nested)} layers are not supported")
    found = {"rope_theta": fields["rope_theta"]} | found
    if fields["original_max_position_embeddings"] is not None:
        found["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return _resolve(found, fields, head_dim, context, partial)


def per_kind(fields: Fields, head_dim: int, context: int) -> tuple[Rope, Rope]:
    """Return the rotary frequencies of full layers, and those of sliding layers (Gemma 3).

    `rope_parameters` may hold an object for each kind of layer. `rope_scaling` applies only to full layers.

    Raises:
        ModelError: if the kind of scaling is not supported.
    """
    nested = object_of(fields, "rope_parameters")
    ropes = []
    for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        found = {"rope_theta": fields[theta]} | object_of(nested, kind)
        if kind == "full_attention":
            found |= object_of(fields, "rope_scaling")
        found.pop("truncate", None)  # transformers does not look for it inside the objects of the kinds
        ropes.append(_resolve(found, fields, head_dim, context, False))
    return ropes[0], ropes[1]


def of_kind(fields: Fields, kind: str, head_dim: int, otherwise: Fields) -> Rope:
    """Return the rotary frequencies of the layers of `kind`, whose heads have `head_dim` values.

    `rope_parameters` has an object for each kind of layers; `otherwise` is used if `rope_parameters` is null.
    Proportional RoPE rotates the first pairs of a head, with frequencies as if it rotated all of them.

    Raises:
        ModelError: if `rope_parameters` lacks the kind, or its scaling is not supported.
    """
    every = fields["rope_parameters"]
    given = (otherwise if every is None else every).get(kind) if isinstance(every, dict | None) else None
    if not isinstance(given, dict):
        raise ModelError(f"rope_parameters has no object for {kind} layers")
    found = {"rope_theta": fields["rope_theta"]} | given
    found.pop("truncate", None)  # transformers does not look for it inside the objects of the kinds
    if fields["partial_rotary_factor"] is not None:
        found.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    theta, context = float_field(found, "rope_theta"), size_field(fields, "max_position_embeddings")
    name, share = found.get("rope_type", found.get("type", "default")), found.get("partial_rotary_factor")
    if name == "proportional":
        turned = int(float_field(found, "partial_rotary_factor", 1.0) * head_dim // 2)
        factor = float_field(found, "factor", 1.0)
        if not 0 <= 2 * turned <= head_dim or not factor > 0:
            raise ModelError(f"proportional rope of {turned} pairs with a factor of {factor} is not possible")
        base = frequencies(theta, head_dim) / np.float32(factor)
        return plain(np.where(np.arange(len(base)) < turned, base, np.float32(0)))
    if share not in (None, 1) and name != "default":
        raise ModelError(f"partial_rotary_factor {share} with rope scaling {name!r} is not possible for this family")
    if name == "longrope":
        raise ModelError("rope scaling 'longrope' is not supported for this family")
    return scaled(name, frequencies(theta, head_dim), theta, found, context)


def scaling(fields: Fields) -> Fields:
    """Return the object with the parameters of scaling: `rope_scaling`, or else `rope_parameters`; it may be empty.

    Raises:
        ModelError: if the field is not an object.
    """
    return object_of(fields, "rope_scaling") or object_of(fields, "rope_parameters")


def scaling_kind(fields: Fields) -> str:
    """Return the kind of scaling, as the configuration names it; "default" for none.

    Raises:
        ModelError: if `rope_scaling` or `rope_parameters` is not an object.
    """
    found = scaling(fields)
    return str(found.get("rope_type", found.get("type", "default")))[:80]


def _resolve(found: Fields, fields: Fields, head_dim: int, context: int, partial: bool) -> Rope:
    kind = _kind(found)
    theta, rotary = float_field(found, "rope_theta"), head_dim
    share = found.get("partial_rotary_factor", fields["partial_rotary_factor"])
    if share not in (None, 1) and partial:
        rotary = int(head_dim * float_field({"partial_rotary_factor": share}, "partial_rotary_factor"))
    elif share not in (None, 1) and kind != "default":  # without scaling, these families ignore the factor
        raise ModelError(f"partial_rotary_factor {share} with rope scaling {kind!r} is not possible for this family")
    if kind in _SCALED and found.get("original_max_position_embeddings") is None:
        found = {**found, "original_max_position_embeddings": context}
    return scaled(kind, frequencies(theta, rotary), theta, found, context)


def _kind(found: Fields) -> str:
    """Return the kind of scaling; older files of Phi-3 call LongRoPE `su` or `yarn`."""
    kind = str(found.get("rope_type", found.get("type", "default")))
    return "longrope" if kind in ("su", "yarn") and "short_factor" in found else kind


def object_of(fields: Fields, name: str) -> dict[str, Any]:
    """Return the object in the field `name`; empty if the field is missing or null.

    Raises:
        ModelError: if the field is not an object.
    """
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise ModelError(f"{name} is not an object in the model's configuration")
    return found


_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# The sections of a multimodal rotary embedding do not matter to text: all positions of a token are equal.
_SECTIONS = {"mrope_section", "mrope_interleaved"}
_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_LONG = {"factor", "original_max_position_embeddings"}
_KEYS_OF: dict[str, set[str]] = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": _LONG | {"low_freq_factor", "high_freq_factor"},
    "yarn": _LONG | {"attention_factor"} | _YARN,
    "longrope": _LONG | {"attention_factor", "short_factor", "long_factor"},
}
_KEYS_OF["su"] = _KEYS_OF["longrope"]


def unread(fields: Fields, partial: bool) -> list[str]:
    """Return the dotted names of fields about rotary embeddings that have no effect.

    `partial` is True if the family can rotate a part of each head.
    """
    scaling, parameters = object_of(fields, "rope_scaling"), object_of(fields, "rope_parameters")
    kinds = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    names = ["rope_parameters"] if scaling and parameters and not kinds and scaling != parameters else []
    if not partial and fields.get("partial_rotary_factor") not in (None, 1):
        names.append("partial_rotary_factor")
    objects = {f"rope_parameters.{name}": value for name, value in kinds.items()}
    objects |= {"rope_scaling": scaling} if scaling else {} if kinds else {"rope_parameters": parameters}
    for where, found in objects.items():
        names += [f"{where}.{key}" for key in _foreign(found, fields, partial)]
    return names


def _foreign(found: Fields, fields: Fields, partial: bool) -> list[str]:
    """Return the sorted keys of an object of scaling that have no effect.

    They are unknown to its kind, or a top-level field overrides them.
    """
    kind = _kind(found)
    known = _KEYS | _KEYS_OF[kind if kind in _KEYS_OF else "dynamic"]
    known |= _SECTIONS if partial else set()
    known -= {"factor"} if kind == "default" else set()
    original = fields.get("original_max_position_embeddings")
    if original not in (None, found.get("original_max_position_embeddings", original)):
        known -= {"original_max_position_embeddings"}
    return sorted(str(key)[:60] for key in found if key not in known)
