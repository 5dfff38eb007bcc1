"""Values of the fields of Gemma 4 for random draws."""

import random
from typing import Any

from tests.support.differential.rope_draws import rope

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM")

PLAIN: dict[str, Any] = {"hidden_size_per_layer_input": 0}
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_size_per_layer_input": (0, 8, 24), "vocab_size_per_layer_input": (40, 1),
    "attention_k_eq_v": (True, False), "num_kv_shared_layers": (0, 0, 1), "use_double_wide_mlp": (True, False),
    "enable_moe_block": (False, True), "top_k_experts": (1, 2),
}  # fmt: skip

_EXPERTS = {"num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 24}


def settle(architecture: str, found: dict[str, Any], layers: int, rng: random.Random) -> None:
    """Set heads of full layers, both rotary embeddings, and mostly values that TPI does not refuse by name."""
    if architecture not in ARCHITECTURES:
        return
    found.setdefault("sliding_window", rng.choice([4, 7, 100]))
    if found["sliding_window"] is None and rng.random() < 0.97:
        found["sliding_window"] = 5
    if found.get("num_key_value_heads", 4) is None and rng.random() < 0.9:
        found["num_key_value_heads"] = 2
    _settle_embeddings(found, layers, rng)
    if found.get("enable_moe_block"):
        found |= {name: value for name, value in _EXPERTS.items() if found.get(name) is None}
    if rng.random() < 0.95:
        found.pop("rope_scaling", None)
    if "use_bidirectional_attention" in found:
        found["use_bidirectional_attention"] = rng.choice([None, "vision"] if rng.random() < 0.97 else ["all"])
    if rng.random() < 0.97:
        found["global_head_dim"] = rng.choice([8, 12, 16, 32])
    if rng.random() < 0.8:
        found["num_global_key_value_heads"] = rng.choice([1, 2, None])
    if rng.random() < 0.4:
        _name_layers(found, rng)
    if found.get("rope_parameters"):
        found["rope_parameters"] = _ropes(rng)


def _settle_embeddings(found: dict[str, Any], layers: int, rng: random.Random) -> None:
    """Set the per-layer embeddings, which models with shared keys and values have."""
    if found.get("num_kv_shared_layers"):  # transformers cannot run one without the other
        found["hidden_size_per_layer_input"] = found.get("hidden_size_per_layer_input") or 8
    if found.get("hidden_size_per_layer_input"):
        found.setdefault("num_hidden_layers", layers)  # 30 random ones are chaotic: f32 and f64 differ in transformers
    if found.get("hidden_size_per_layer_input") and rng.random() < 0.9:
        found["vocab_size_per_layer_input"] = found.get("vocab_size", 40)


def _name_layers(found: dict[str, Any], rng: random.Random) -> None:
    """Write the heads of full layers as transformers does, layer by layer."""
    full = {"head_dim": rng.choice([8, 16]), "num_key_value_heads": rng.choice([1, 2])}
    kinds, count = found.get("layer_types"), found.get("num_hidden_layers")
    if isinstance(kinds, list) and isinstance(count, int):
        kinds = [*kinds[: count - 1], "full_attention"]
        found["per_layer_config"] = {str(at): full for at, kind in enumerate(kinds) if kind == "full_attention"}
        if rng.random() < 0.05:
            found["per_layer_config"]["0"] = rng.choice([{"head_dim": 4}, {"intermediate_size": 64}])


def _ropes(rng: random.Random) -> dict[str, Any]:
    """Return the rotary embeddings of both kinds of layers; full layers mostly have proportional ones."""
    kinds = ["default", "linear", "dynamic", "llama3", "yarn"]
    found = {kind: rope(rng, rng.choice(kinds)) for kind in ("full_attention", "sliding_attention")}
    if rng.random() < 0.6:
        share = rng.choice([{}, {"partial_rotary_factor": rng.choice([0.25, 0.5, 0.7, 1.0])}])
        stretch = {"factor": 2.0} if rng.random() < 0.3 else {}
        found["full_attention"] = {"rope_type": "proportional", "rope_theta": 500.0} | share | stretch
    for own in found.values():
        own.setdefault("rope_theta", 300.0)
        own.setdefault("original_max_position_embeddings", 16)
    return found
