"""Values of fields for random draws of DBRX, whose fields lie in nested objects under other names."""

import random
from collections.abc import Callable
from typing import Any

NESTED = ("DbrxForCausalLM",)
_BASE = "rope_theta"
_UNCLIPPED = 1e30

PLAIN: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
CHOICES: dict[str, tuple[Any, ...]] = {
    "d_model": (64, 96), "n_heads": (2, 8), "n_layers": (1, 3), "max_seq_len": (48, 128),
    "emb_pdrop": (0.0, 0.5),
}  # fmt: skip
_ATTENTION: dict[str, tuple[Any, ...]] = {
    "clip_qkv": (None, 0.3, 1.0, 8), "kv_n_heads": (1, 2), _BASE: (100, 10000.0, 500000), "attn_pdrop": (0.0, 0.5),
}  # fmt: skip
_FFN: dict[str, tuple[Any, ...]] = {
    "ffn_hidden_size": (32, 40, 72), "moe_num_experts": (3, 4, 6), "moe_top_k": (1, 2, 3),
    "moe_normalize_expert_weights": (1.0, None), "moe_jitter_eps": (None, 0.1), "moe_loss_weight": (0.05,),
    "ffn_act_fn": ({"name": "gelu"}, {"name": "relu"}, {"name": "silu"}, {"name": "gelu_new"}, {}, None),
    "hidden_size": (32, 6144),
}  # fmt: skip
INSIDE = frozenset((*_ATTENTION, *_FFN)) - {"hidden_size"}
_ODD: dict[str, Any] = {"moe_normalize_expert_weights": 2.0, "ffn_act_fn": {"name": "tanh"}, "clip_qkv": -1.0}
# Beside their objects, or under another name: what counts for other families and not for this one, or twice.
_STRAY: dict[str, Any] = {
    "clip_qkv": 0.3, "num_key_value_heads": 1, "hidden_act": "relu", "num_experts": 3, "num_experts_per_tok": 1,
    "intermediate_size": 40, "norm_eps": 0.5, "hidden_size": 32, "num_attention_heads": 4,
}  # fmt: skip


def values(one_of: Callable[..., Callable[[random.Random], Any]]) -> dict[str, Callable[[random.Random], Any]]:
    """Return the values to draw from, by field; the fields of objects are nested."""
    found = {name: one_of(*choices) for name, choices in CHOICES.items()}
    return found | {"attn_config": lambda rng: _object(rng, _ATTENTION), "ffn_config": lambda rng: _object(rng, _FFN)}


def _object(rng: random.Random, choices: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return an object with some of its fields, and rarely with a field that no model has."""
    found = {name: rng.choice(some) for name, some in choices.items() if rng.random() < 0.85}
    odd = [name for name in found if name in _ODD and rng.random() < 0.02]
    return found | {name: _ODD[name] for name in odd} | ({"unheard_of": 1} if rng.random() < 0.1 else {})


def inside(found: dict[str, Any]) -> set[str]:
    """Return the names of the fields that are drawn inside objects."""
    return {name for part in ("attn_config", "ffn_config") for name in found.get(part) or {}}


def settle(found: dict[str, Any], rng: random.Random) -> None:
    """Set rotary bases that mostly do not contradict each other, a head, and a stray field."""
    attention = found.get("attn_config")
    if rng.random() < 0.95:
        found["tie_word_embeddings"] = False  # transformers raises otherwise
    base = _beside(found)
    if attention and base is not None and rng.random() < 0.8:
        attention[_BASE] = rng.choice([base, None])
    if rng.random() < 0.2:
        name = rng.choice(list(_STRAY))
        found.setdefault(name, _STRAY[name])


def for_transformers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as transformers needs them.

    The rotary base of `attn_config` is copied to the place where transformers looks, unless one is there. A limit for
    clipping is set, without which transformers raises.
    """
    attention = {_BASE: None} | (fields.get("attn_config") or {})
    if attention.get("clip_qkv") is None:
        attention["clip_qkv"] = _UNCLIPPED
    found = fields | {"attn_config": attention}
    base = attention[_BASE]
    return found | {_BASE: base} if _beside(fields) is None and base is not None else found


def _beside(fields: dict[str, Any]) -> Any:
    """Return the rotary base outside the objects, if any."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    return scaling.get(_BASE, fields.get(_BASE))
