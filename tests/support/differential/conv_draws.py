"""Values of fields for random draws of families with short convolutions."""

import random
from typing import Any

ARCHITECTURES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM")

PLAIN: dict[str, Any] = {"conv_L_cache": 3, "block_multiple_of": 8, "num_dense_layers": 1}
CHOICES: dict[str, tuple[Any, ...]] = {
    "conv_L_cache": (2, 4, 7), "block_multiple_of": (3, 16), "block_ffn_dim_multiplier": (0.7, 1.3, 2),
    "block_auto_adjust_ff_dim": (True, False, False), "full_attn_idxs": ([0], [1, 2], [], None),
    "use_sandwich_norm": (True, False, False), "use_attention_gate": (True, False, False),
    "conv_bias": (False, False, True), "num_dense_layers": (0, 2), "use_expert_bias": (True, False),
}  # fmt: skip


def _ropes(rng: random.Random) -> dict[str, Any]:
    """Return the rotary embeddings of LFM3's kinds of layers."""
    share = rng.choice([0.25, 0.5, 1.0])
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0])},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": 500.0},
    }


def settle(architecture: str, found: dict[str, Any], layers: int, rng: random.Random) -> None:
    """Set layers of known kinds, and mostly values that TPI does not refuse by name."""
    if architecture not in ARCHITECTURES:
        return
    chance = rng.random()
    if chance < 0.3 and architecture == "Lfm2ForCausalLM":
        found["layer_types"] = None  # `full_attn_idxs` counts
    elif chance < 0.97:
        kinds = ["conv", "conv", "full_attention"]
        if architecture == "Lfm3ForCausalLM":
            kinds[1] = "sliding_attention"
            found["rope_parameters"] = None if rng.random() < 0.5 else _ropes(rng)
        found["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
        count = found.get("num_hidden_layers")
        if rng.random() < 0.97:  # one at least must attend
            found["layer_types"][rng.randrange(count if isinstance(count, int) else layers)] = "full_attention"
    if rng.random() < 0.9:
        found["conv_bias"] = False
    if rng.random() < 0.1:
        found["tie_embedding"] = rng.choice([True, False])
    if rng.random() < 0.1:
        found["block_ff_dim"] = rng.choice([48, 90])
