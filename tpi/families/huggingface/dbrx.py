"""The configuration of DBRX, whose fields lie in objects and have names of their own: flat, and as others call them.

A field that transformers looks for in an object does not count beside it. Of its rotary embedding's base two programs
mean two fields: the model was trained with the one in `attn_config`, which transformers used up to version 4; later
ones want it to be there and take that of `rope_parameters`, or 10000. So it counts where the configuration says nothing
else.
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
# The objects, and the common name of what is in each.
_OBJECTS: Mapping[str, Mapping[str, str]] = {
    "attn_config": {"clip_qkv": "clip_qkv", "kv_n_heads": "num_key_value_heads", "attn_pdrop": "attention_dropout"},
    "ffn_config": {"ffn_hidden_size": "intermediate_size", "moe_num_experts": "num_experts",
                   "moe_top_k": "num_experts_per_tok", "moe_jitter_eps": "router_jitter_noise",
                   "moe_normalize_expert_weights": "moe_normalize_expert_weights",
                   "moe_loss_weight": "router_aux_loss_coef", "ffn_act_fn": "hidden_act"},
}  # fmt: skip
_INSIDE = {name for names in _OBJECTS.values() for name in names.values()}
_MIRRORS = "hidden_size"  # in ffn_config, which transformers sets to the model's
_BASE = "rope_theta"


def flat(fields: Fields) -> dict[str, Any]:
    """The fields under the names that other families have; those that mean nothing under names that say so.

    Raises:
        ModelError: if two fields that say the same differ, or one that should be an object is none.
    """
    base = _base(fields)
    for own, name in _NAMES.items():
        fields = renamed(fields, own, name)
    beside = {name: value for name, value in fields.items() if name not in _OBJECTS}
    found = {(f"{name} beside its object" if name in _INSIDE else name): value for name, value in beside.items()}
    for part in _OBJECTS:
        found |= _inside(part, _object(fields, part))
    return found | base


def _object(fields: Fields, part: str) -> dict[str, Any]:
    found = fields.get(part) or {}
    if not isinstance(found, dict):
        raise ModelError(f"{part} is not an object in the model's configuration")
    return found


def _inside(part: str, fields: Fields) -> dict[str, Any]:
    """What is in one of the objects."""
    found = {}
    for name, value in fields.items():
        if name.startswith("rope_") and name != _BASE:
            raise ModelError(f"{part}.{name} is not supported; it belongs beside {part}")
        if name not in (_MIRRORS, _BASE):
            known = name in HARMLESS or name in REFUSED
            found[_OBJECTS[part].get(name, name if known else f"{part}.{name}")] = value
    if "hidden_act" in found:
        found["hidden_act"] = _activation(found["hidden_act"])
    return found


def _activation(value: Any) -> Any:
    """Its name, which lies in an object."""
    return value.get("name", "silu") if isinstance(value, dict) else value or "silu"


def _base(fields: Fields) -> dict[str, Any]:
    """The base in `attn_config`, if there is one; ModelError if another field says something else."""
    trained, other = _object(fields, "attn_config").get(_BASE), scaling(fields).get(_BASE, fields.get(_BASE))
    if trained is None:
        return {}
    if other not in (None, trained):
        raise ModelError(
            f"attn_config.{_BASE} is {str(trained)[:80]}, and {_BASE} {str(other)[:80]}; programs take one or the "
            "other, so leave the one that the model was trained with"
        )
    return {_BASE: trained}
