"""Defaults of config.json for the families with Mamba2 layers, like `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.families.base import Fields
from tpi.families.huggingface.expertdefaults import GRANITE, renamed

GRANITE_HYBRID: dict[str, Any] = GRANITE | {
    "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "layers_block_type": None, "hybrid_override_pattern": None,
    "tie_word_embeddings": False, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "attention_bias": False, "sliding_window": None, "intermediate_size": 21504,
    "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "use_conv_bias": True,
    "mamba_proj_bias": False, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    # Fields that transformers does not use for this architecture:
    "num_hidden_layers": None, "expand": 2, "chunk_size": 128, "time_step_limit": (0.0, float("inf")),
    "time_step_max": 0.1, "time_step_floor": 1e-4, "use_mamba_kernels": True, "mamba_ssm_cache_dtype": "float32",
    "moe_shared_expert_overlap": True, "num_logits_to_keep": 1, "num_nextn_predict_layers": 0,
    "mtp_layers_block_type": None, "mtp_hybrid_override_pattern": None, "residual_in_fp32": False,
    "rescale_prenorm_residual": True,
}  # fmt: skip
_OLDER_NAMES = {
    "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_expand": "expand", "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size",
}  # fmt: skip


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Return the fields with `layers_block_type`, the name in some files, renamed to `layer_types`.

    Raises:
        ModelError: if both fields are present and differ.
    """
    return renamed(fields, "layers_block_type", "layer_types")


def nemotron(fields: Fields) -> Fields:
    """Return the fields of Nemotron-H with the names that transformers gives to them.

    Raises:
        ModelError: if a field is present under two names and differs.
    """
    for other, name in _OLDER_NAMES.items():
        fields = renamed(fields, other, name)
    return fields
