"""Conversion of DBRX's configuration, which has nested objects and its own names, to flat fields with common names.

A field that transformers reads from an object is ignored outside that object. The base of the rotary embedding can be
in two places. The model was trained with the one in `attn_config`, which transformers used up to version 4. Later
versions require it there, but use the one of `rope_parameters`, or 10000. TPI uses the one in `attn_config`, and
refuses a configuration in which the other differs.
"""

from collections.abc import Mapping
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields
from tpi.families.huggingface.defaults import HARMLESS, REFUSED
from tpi.families.huggingface.expertdefaults import renamed
from tpi.families.huggingface.rope import scaling

_NAMES = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings", "emb_pdrop": "embd_pdrop",
}  # fmt: skip
# The nested objects, and the common names of their fields.
_OBJECTS: Mapping[str, Mapping[str, str]] = {
    "attn_config": {"clip_qkv": "clip_qkv", "kv_n_heads": "num_key_value_heads", "attn_pdrop": "attention_dropout"},
    "ffn_config": {"ffn_hidden_size": "intermediate_size", "moe_num_experts": "num_experts",
                   "moe_top_k": "num_experts_per_tok", "moe_jitter_eps": "router_jitter_noise",
                   "moe_normalize_expert_weights": "moe_normalize_expert_weights",
                   "moe_loss_weight": "router_aux_loss_coef", "ffn_act_fn": "hidden_act"},
}  # fmt: skip
_INSIDE = {name for names in _OBJECTS.values() for name in names.values()}
_MIRRORS = "hidden_size"  # a field of ffn_config that transformers sets to the model's hidden size
_BASE = "rope_theta"


def flat(fields: Fields) -> dict[str, Any]:
    """Return the fields in one flat dictionary, under the names that other families use.

    A field that has no effect gets a name that says so, for the note about ignored fields.

    Raises:
        ModelError: if two fields of the same meaning differ, or a field that must be an object is not one.
    """
    base = _base(fields)
    for own, name in _NAMES.items():
        fields = renamed(fields, own, name)
    beside = {name: value for name, value in fields.items() if name not in _OBJECTS}
    found = {(f"{name} outside its object" if name in _INSIDE else name): value for name, value in beside.items()}
    for part in _OBJECTS:
        found |= _inside(part, _object(fields, part))
    return found | base


def _object(fields: Fields, part: str) -> dict[str, Any]:
    found = fields.get(part) or {}
    if not isinstance(found, dict):
        raise ModelError(f"{part} is not an object in the model's configuration")
    return found


def _inside(part: str, fields: Fields) -> dict[str, Any]:
    """Return the fields of the object `part` under common names.

    Raises:
        ModelError: if the object has parameters of rotary embeddings other than their base.
    """
    found = {}
    for name, value in fields.items():
        if name.startswith("rope_") and name != _BASE:
            raise ModelError(f"{part}.{name} is not supported; move it out of {part}, to the top level")
        if name not in (_MIRRORS, _BASE):
            known = name in HARMLESS or name in REFUSED
            found[_OBJECTS[part].get(name, name if known else f"{part}.{name}")] = value
    if "hidden_act" in found:
        found["hidden_act"] = _activation(found["hidden_act"])
    return found


def _activation(value: Any) -> Any:
    return value.get("name", "silu") if isinstance(value, dict) else value or "silu"


def _base(fields: Fields) -> dict[str, Any]:
    """Return the field for the rotary base in `attn_config`, or no field if there is none.

    Raises:
        ModelError: if another field has another base.
    """
    trained, other = _object(fields, "attn_config").get(_BASE), scaling(fields).get(_BASE, fields.get(_BASE))
    if trained is None:
        return {}
    if other not in (None, trained):
        raise ModelError(
            f"attn_config.{_BASE} is {str(trained)[:80]}, but {_BASE} is {str(other)[:80]}; programs disagree on which "
            "one to use, so keep only the one that the model was trained with"
        )
    return {_BASE: trained}
