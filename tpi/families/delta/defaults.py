"""Defaults of config.json for the families with DeltaNet layers, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.families.huggingface.defaults import COMMON

_LINEAR: dict[str, Any] = COMMON | {
    "max_position_embeddings": 32768, "head_dim": 256, "attention_bias": False, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "layer_types": None,
    # No longer in the config classes of transformers, but in model files:
    "full_attention_interval": 4, "mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
QWEN35 = _LINEAR | {
    "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
QWEN35_MOE = _LINEAR | {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip
del QWEN35_MOE["intermediate_size"]
NEXT = _LINEAR | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512, "norm_topk_prob": True,
}  # fmt: skip
