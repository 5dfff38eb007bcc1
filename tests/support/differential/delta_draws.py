"""Values of fields for random draws of families with DeltaNet layers."""

import random
from typing import Any

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")

PLAIN: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "linear_num_value_heads": (2, 6, 8), "linear_num_key_heads": (1, 2), "linear_key_head_dim": (4, 12),
    "linear_value_head_dim": (4, 16, 20), "linear_conv_kernel_dim": (2, 3, 6),
}  # fmt: skip


def settle(architecture: str, found: dict[str, Any], layers: int, rng: random.Random) -> None:
    """Set layers of known kinds, and mostly values that TPI does not refuse by name."""
    if architecture not in ARCHITECTURES:
        return
    if rng.random() < 0.97 or "layer_types" not in found:
        found["layer_types"] = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
        count = found.get("num_hidden_layers")
        if rng.random() < 0.97:  # one at least must attend
            found["layer_types"][rng.randrange(count if isinstance(count, int) else layers)] = "full_attention"
    if rng.random() < 0.95:
        found |= {"attention_bias": False, "hidden_act": "silu"}
    if rng.random() < 0.95:
        found["head_dim"] = rng.choice([8, 16])  # of which a quarter is rotated
    if found.get("linear_num_key_heads") == 2 and rng.random() < 0.9:
        found["linear_num_value_heads"] = rng.choice([2, 4, 6])
