"""Defaults of config.json for the families with latent attention, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.families.base import Fields
from tpi.families.huggingface.defaults import COMMON
from tpi.families.huggingface.expertdefaults import renamed

_BOTH: dict[str, Any] = COMMON | {
    "attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
    # No longer in the config classes of transformers, but in model files:
    "moe_layer_freq": 1,
}  # fmt: skip
V2 = _BOTH | {
    "vocab_size": 102400, "mlp_bias": False, "first_k_dense_replace": 0, "n_group": None, "n_routed_experts": 64,
    "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy",
    "norm_topk_prob": False, "num_experts_per_tok": None, "moe_intermediate_size": 1407, "scoring_func": "softmax",
}  # fmt: skip
V3 = _BOTH | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 4096, "rope_interleave": True,
    "num_mtp_layers": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip

GLM = V3 | {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64,
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5, "num_mtp_layers": 0, "mlp_layer_types": None,
}  # fmt: skip


def v2(fields: Fields) -> dict[str, Any]:
    """Return the fields with `num_experts` renamed to `n_routed_experts`.

    Raises:
        ModelError: if both are present and differ.
    """
    return renamed(fields, "num_experts", "n_routed_experts")


def v3(fields: Fields) -> dict[str, Any]:
    """Return the fields with two older names replaced: `num_local_experts` and `num_nextn_predict_layers`.

    Raises:
        ModelError: if a field is present under both names with different values.
    """
    found = renamed(fields, "num_local_experts", "n_routed_experts")
    return renamed(found, "num_nextn_predict_layers", "num_mtp_layers")
