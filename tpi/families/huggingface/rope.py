"""Rotary frequencies from a config.json: which of its fields count, as transformers resolves them.

`rope_scaling` wins over `rope_parameters`; what neither says is taken from `rope_theta`, `partial_rotary_factor` and
`original_max_position_embeddings` beside them. The last wins even over the one inside.
"""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, number
from tpi.families.rope import Rope, frequencies, scaled

_SCALED = ("llama3", "yarn", "longrope")  # kinds that have an original context


def flat(fields: Fields, head_dim: int, context: int, partial: bool = False) -> Rope:
    """The frequencies of all layers. `partial`: the family can rotate a part of each head (Phi-3).

    Raises:
        ModelError: if the type of scaling is not supported, or it differs from layer to layer.
    """
    found = _object(fields, "rope_scaling") or _object(fields, "rope_parameters")
    nested = [str(name) for name, value in found.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(f"rotary embeddings of their own for {', '.join(nested)} layers are not supported")
    found = {"rope_theta": fields["rope_theta"]} | found
    if fields["original_max_position_embeddings"] is not None:
        found["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return _resolve(found, fields, head_dim, context, partial)


def per_kind(fields: Fields, head_dim: int, context: int) -> tuple[Rope, Rope]:
    """The frequencies of full and of sliding layers (Gemma 3), which `rope_parameters` may hold apart; `rope_scaling`
    is about full layers alone. Raises ModelError as `flat`."""
    nested = _object(fields, "rope_parameters")
    ropes = []
    for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        found = {"rope_theta": fields[theta]} | _object(nested, kind)
        if kind == "full_attention":
            found |= _object(fields, "rope_scaling")
        found.pop("truncate", None)  # transformers looks for it beside the kinds
        ropes.append(_resolve(found, fields, head_dim, context, False))
    return ropes[0], ropes[1]


def scaling(fields: Fields) -> Fields:
    """The object that counts; ModelError if it is none."""
    return _object(fields, "rope_scaling") or _object(fields, "rope_parameters")


def scaling_kind(fields: Fields) -> str:
    """The name of the scaling that counts; ModelError if it is not in an object."""
    found = scaling(fields)
    return str(found.get("rope_type", found.get("type", "default")))[:80]


def _resolve(found: Fields, fields: Fields, head_dim: int, context: int, partial: bool) -> Rope:
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in ("su", "yarn") and partial:
        kind = "longrope"  # what older files of Phi-3 call it
    theta, rotary = number(found, "rope_theta"), head_dim
    share = found.get("partial_rotary_factor", fields["partial_rotary_factor"])
    if share not in (None, 1) and partial:
        rotary = int(head_dim * number({"partial_rotary_factor": share}, "partial_rotary_factor"))
    elif share not in (None, 1) and kind != "default":  # which ignores it in these families
        raise ModelError(f"partial_rotary_factor {share} with rope scaling {kind!r} is not possible for this family")
    if kind in _SCALED and found.get("original_max_position_embeddings") is None:
        found = {**found, "original_max_position_embeddings": context}
    return scaled(kind, frequencies(theta, rotary), theta, found, context)


def _object(fields: Fields, name: str) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise ModelError(f"{name} is not an object in the model's configuration")
    return found


_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
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
    """What of `fields` about rotary embeddings does not count, as dotted names. `partial` as for `flat`."""
    scaling, parameters = _object(fields, "rope_scaling"), _object(fields, "rope_parameters")
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
    """Keys of one object that its kind of scaling does not have, or that something beside it overrules."""
    kind = str(found.get("rope_type", found.get("type", "default")))
    known = _KEYS | _KEYS_OF["longrope" if partial and kind == "yarn" else kind if kind in _KEYS_OF else "dynamic"]
    known -= {"factor"} if kind == "default" else set()
    original = fields.get("original_max_position_embeddings")
    if original not in (None, found.get("original_max_position_embeddings", original)):
        known -= {"original_max_position_embeddings"}
    return sorted(str(key)[:60] for key in found if key not in known)
