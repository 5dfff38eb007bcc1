"""Defaults of config.json for Gemma 4, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.families.huggingface.defaults import GEMMA3

LAYERS = "fields of single layers"  # not a field of config.json: `flatten` derives it from per_layer_config

_LEFT = (
    "query_pre_attn_scalar", "attn_logit_softcapping", "rope_scaling", "original_max_position_embeddings",
    "rope_local_base_freq", "sliding_window_pattern",
)  # fmt: skip
UNIFIED: dict[str, Any] = {name: value for name, value in GEMMA3.items() if name not in _LEFT} | {
    "vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 262144, "rope_theta": None,
    "sliding_window": 1024, "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    # Not in the config classes of transformers, which turn them into per_layer_config:
    "global_head_dim": 512, "num_global_key_value_heads": None, LAYERS: None,
}  # fmt: skip
GEMMA4 = UNIFIED | {
    "max_position_embeddings": 131072, "sliding_window": 512, "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256, "enable_moe_block": False, "num_experts": None, "top_k_experts": None,
    "moe_intermediate_size": None,
}  # fmt: skip
