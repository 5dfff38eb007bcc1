"""Defaults of config.json for the families with experts, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields
from tpi.families.huggingface.defaults import COMMON
from tpi.families.huggingface.defaults import QWEN2 as DENSE_QWEN2

MICROSCALED = "experts in mxfp4"  # not a field of config.json: `gpt_oss` derives it from quantization_config

MIXTRAL = COMMON | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "sliding_window": None, "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
_QWEN: dict[str, Any] = DENSE_QWEN2 | {
    "hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1, "norm_topk_prob": False,
    "mlp_only_layers": None,
}  # fmt: skip
QWEN2 = _QWEN | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True,
}  # fmt: skip
QWEN3 = _QWEN | {
    "intermediate_size": 6144, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    "num_experts": 128, "attention_bias": False,
}  # fmt: skip
del QWEN3["max_window_layers"], QWEN3["layer_types"]
OLMOE = COMMON | {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
    "clip_qkv": None, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip
GRANITE = COMMON | {
    "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DBRX = COMMON | {
    "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "intermediate_size": 3584, "num_key_value_heads": 1, "clip_qkv": None, "num_experts": 4, "num_experts_per_tok": 1,
    "moe_normalize_expert_weights": 1.0,
}  # fmt: skip

GPT_OSS = COMMON | {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "layer_types": None,
    "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    MICROSCALED: False,
}  # fmt: skip


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """Return the fields with `num_experts` renamed to `num_local_experts`.

    If the experts are in MXFP4, the field `MICROSCALED` replaces `quantization_config`.

    Raises:
        ModelError: if both names are present and their values differ.
    """
    found = num_local_experts(fields)
    quantised = found.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":
        del found["quantization_config"]
        found[MICROSCALED] = True
    return found


def num_experts(fields: Fields) -> dict[str, Any]:
    """Return the fields with `num_local_experts` renamed to `num_experts`.

    Raises:
        ModelError: if both are present and differ.
    """
    return renamed(fields, "num_local_experts", "num_experts")


def num_local_experts(fields: Fields) -> dict[str, Any]:
    """Return the fields with `num_experts` renamed to `num_local_experts`.

    Raises:
        ModelError: if both are present and differ.
    """
    return renamed(fields, "num_experts", "num_local_experts")


def renamed(fields: Fields, other: str, name: str) -> dict[str, Any]:
    """Return the fields with `other` renamed to `name`.

    Raises:
        ModelError: if both are present and differ.
    """
    if other in fields and fields.get(name, fields[other]) != fields[other]:
        raise ModelError(f"{name} is {fields[name]!r}, but {other}, which means the same, is {fields[other]!r}")
    return {name if key == other else key: value for key, value in fields.items()}
