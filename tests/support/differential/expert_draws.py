"""Values of fields for random draws of families with experts, and the tensors as files name them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLIDING = ("Qwen2MoeForCausalLM", "GptOssForCausalLM")
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")

PLAIN: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "topk_method": "greedy", "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "kv_lora_rank": 16,
    "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_mtp_layers": 0,
}  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_experts": (3, 5, 6), "num_local_experts": (3, 5, 6), "num_experts_per_tok": (1, 1, 2, 3),
    "moe_intermediate_size": (32, 72), "shared_expert_intermediate_size": (32, 40), "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [0], None), "clip_qkv": (None, 0.5, 2.0),
    "qkv_bias": (True, False), "output_router_logits": (False,), "router_aux_loss_coef": (0.1,),
    "router_jitter_noise": (0.0, 0.3), "swiglu_alpha": (1.0, 1.5), "swiglu_limit": (0.3, 1.0),
    "n_routed_experts": (12, 16), "n_shared_experts": (2, 3), "n_group": (1, 2), "topk_group": (1, 3),
    "topk_method": ("group_limited_greedy",), "first_k_dense_replace": (0, 2, 9), "routed_scaling_factor": (0.5, 2.5),
    "kv_lora_rank": (12, 32), "q_lora_rank": (None, 12, 20), "qk_nope_head_dim": (12, 16), "qk_rope_head_dim": (2, 8),
    "v_head_dim": (4, 10), "num_mtp_layers": (1, 2), "rope_interleave": (True, False),
    "mlp_layer_types": (["dense"] * 3, ["sparse", "dense", "sparse"], ["sparse"] * 3, None),
}  # fmt: skip


def values(one_of: Callable[..., Callable[[random.Random], Any]]) -> dict[str, Callable[[random.Random], Any]]:
    """Return the values to draw from, by field."""
    return {name: one_of(*choices) for name, choices in CHOICES.items()}


def settle(architecture: str, found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly a window if layers may slide: transformers raises if a layer slides without a window."""
    if architecture in SLIDING and found.get("sliding_window", 1) is None and rng.random() < 0.9:
        found["sliding_window"] = 7
    if architecture in LATENT and rng.random() < 0.97:
        _settle_latent(architecture, found)


def _settle_latent(architecture: str, found: dict[str, Any]) -> None:
    """Set a key head for each head, valid groups, and only rarely values that TPI refuses by name."""
    found["num_key_value_heads"] = found.get("num_attention_heads")
    found["head_dim"] = found.get("qk_rope_head_dim", 64)
    groups = found.get("n_group")
    found["topk_group"] = min(found.get("topk_group") or 1, groups) if isinstance(groups, int) else 1
    if architecture == "DeepseekV2ForCausalLM":
        found |= {"norm_topk_prob": False, "mlp_bias": False}


def stored(model: Any, directory: Path) -> dict[str, Any]:
    """Return the tensors as transformers writes them: files of most families do not stack experts."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return dict(load_file(directory / "model.safetensors"))
