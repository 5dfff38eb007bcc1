"""Values of fields for random draws of the families that differ from others in few settings."""

import random
from typing import Any

PLAIN: dict[str, Any] = {
    "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "shared_intermediate_size": 40, "mamba_n_heads": 4, "ssm_state_size": 16, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 40, "mamba_d_state": 16, "moe_topk": 2,
}  # fmt: skip
_LETTERS = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
CHOICES: dict[str, tuple[Any, ...]] = {
    "attention_out_bias": (True, False), "residual_dropout": (0.0, 0.5), "use_bias": (True, False),
    "use_qk_norm": (True, False), "moe_num_experts": (3, 5, 6), "moe_k": (1, 3), "moe_num_shared_experts": (0, 1, 3),
    "moe_layer_start_index": (0, 2), "moe_layer_end_index": (-1, 1, 2), "moe_layer_interval": (1, 2),
    "moe_norm_min": (1e-12, 1e-10), "shared_intermediate_size": (0, 32, 72),
    "position_embedding_type": ("rope", "rope", None), "mamba_n_heads": (2, 8), "mamba_n_groups": (1, 2),
    "mamba_d_state": (8, 20), "mamba_d_head": ("auto", "auto", 16), "mamba_d_conv": (3, 4), "mamba_expand": (2,),
    "mamba_chunk_size": (16, 64), "mamba_conv_bias": (True, False), "mamba_proj_bias": (True, False),
    "time_step_limit": ([0.0, 1.0],), "sliding_window_pattern": (1, 2, 3),
    "layers_block_type": (None,), "mlp_hidden_act": ("relu2", "silu", "gelu"), "ssm_state_size": (8, 20),
    "mamba_num_heads": (2, 8), "mamba_head_dim": (8, 20), "n_groups": (1, 2), "conv_kernel": (3, 4),
    "time_step_min": (1e-6, 0.001, 0.5), "use_conv_bias": (True, False), "chunk_size": (16, 64), "expand": (2, 3),
    "num_logits_to_keep": (2, 3), "use_mamba_kernels": (True, False), "time_step_max": (0.2, 0.3),
    "time_step_floor": (1e-3, 1e-2), "mamba_hidden_act": ("silu",), "mamba_ssm_cache_dtype": ("float32", "float16"),
    "moe_latent_size": (None, None, None, None, 16), "moe_shared_expert_overlap": (True, False),
    "num_nextn_predict_layers": (0, 1), "mtp_layers_block_type": (["full_attention", "moe"],),
    "residual_in_fp32": (True, False), "rescale_prenorm_residual": (True, False),
    "moe_shared_expert_intermediate_size": (32, 72), "moe_topk": (1, 3), "num_shared_experts": (2, 3),
    "eod_token_id": (0, 3, 30), "sep_token_id": (0, 4, 30),
}  # fmt: skip


def settle(architecture: str, found: dict[str, Any], layers: int, rng: random.Random) -> None:
    """Set fields in `found` mostly to values that TPI does not refuse by name."""
    if architecture == "Ernie4_5_MoeForCausalLM" and rng.random() < 0.9:
        found["use_bias"] = False
    if architecture == "GraniteMoeHybridForCausalLM" and rng.random() < 0.97:
        _settle_granite(found, layers, rng)
    if architecture == "NemotronHForCausalLM":
        _settle_nemotron(found, rng)
    if architecture == "Ministral3ForCausalLM":
        for rope in (found.get(name) for name in ("rope_parameters", "rope_scaling")):
            if isinstance(rope, dict) and rng.random() < 0.95:
                rope["llama_4_scaling_beta"] = rng.choice([0.1, 0.5])
                rope["original_max_position_embeddings"] = rng.choice([4, 8, 16])
    if architecture.startswith("HunYuan"):
        _stretch(found, rng)
    if architecture.startswith("Exaone") and found.get("sliding_window", 0) is None and rng.random() < 0.9:
        found["layer_types"] = ["full_attention"] * layers
    if architecture == "ExaoneMoeForCausalLM":
        _settle_exaone(found, rng)
    if architecture == "Glm4MoeForCausalLM":
        groups = found.get("n_group")
        found["topk_group"] = min(found.get("topk_group") or 1, groups) if isinstance(groups, int) else 1


def _settle_granite(found: dict[str, Any], layers: int, rng: random.Random) -> None:
    kinds = ("mamba", "linear_attention", "attention", "full_attention")
    found["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    count = found.get("num_hidden_layers")
    if rng.random() < 0.97:  # one at least must attend
        found["layer_types"][rng.randrange(count if isinstance(count, int) else layers)] = "attention"
    if rng.random() < 0.9:
        found |= {"mamba_proj_bias": False, "hidden_act": "silu"}
    if found.get("mamba_d_head") == 16 and rng.random() < 0.9:  # else its class raises
        found["mamba_d_head"] = 2 * (found.get("hidden_size") or 4096) // (found.get("mamba_n_heads") or 128)
    if rng.random() < 0.3:
        found["num_local_experts"] = 0
    if not found.get("shared_intermediate_size", 1):
        found["shared_intermediate_size"] = 40


def _settle_exaone(found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly valid groups, and a list with an entry for each layer, since transformers raises otherwise."""
    groups, count = found.get("n_group"), found.get("num_hidden_layers")
    found["topk_group"] = min(found.get("topk_group") or 1, groups) if isinstance(groups, int) else 1
    found |= {"sliding_window": found.get("sliding_window") or 7, "num_experts": rng.choice((8, 12, 16))}
    if found.get("num_key_value_heads", 1) is None:
        found["num_key_value_heads"] = 1
    if isinstance(found.get("mlp_layer_types"), list) and isinstance(count, int):
        found["mlp_layer_types"] = found["mlp_layer_types"][:count]


def _settle_nemotron(found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly blocks in a supported order, at least one of them attention, under any of their names."""
    groups = found.get("n_group")
    found["topk_group"] = min(found.get("topk_group") or 1, groups) if isinstance(groups, int) else 1
    if rng.random() < 0.97:
        found["layers_block_type"] = _blocks(found, rng)
        found |= {"sliding_window": None, "n_shared_experts": 1, "mamba_hidden_act": "silu"}
        found |= dict.fromkeys(("attention_bias", "use_bias", "mamba_proj_bias", "mlp_bias"), False)
        if rng.random() < 0.3:
            pattern = "".join(_LETTERS[kind] for kind in found.pop("layers_block_type"))
            found["hybrid_override_pattern"] = pattern
    if "moe" not in (found.get("layers_block_type") or ["moe"]):
        found["mlp_bias"] = rng.random() < 0.5


def _blocks(found: dict[str, Any], rng: random.Random) -> list[str]:
    mixers = [
        "full_attention",
        *(rng.choice(("linear_attention", "full_attention")) for _ in range(rng.choice((0, 1, 2)))),
    ]
    rng.shuffle(mixers)
    return [kind for mixer in mixers for kind in (mixer, *rng.choices(("moe", "mlp"), k=rng.choice((0, 1, 1, 2))))]


def _stretch(found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly an `alpha` that stretches the rotary base."""
    for rope in (found.get(name) for name in ("rope_parameters", "rope_scaling")):
        if isinstance(rope, dict) and rng.random() < 0.6:
            kind = "type" if "type" in rope else "rope_type"
            rope |= {kind: "dynamic", "alpha": rng.choice([2.0, 50.0, 1000.0])}
