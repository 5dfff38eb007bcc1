"""Defaults of config.json for the families with short convolutions, like `tpi.families.huggingface.defaults`."""

from collections.abc import Mapping
from typing import Any

from tpi.families.base import Fields
from tpi.families.huggingface.defaults import COMMON

_CONV: dict[str, Any] = COMMON | {
    "vocab_size": 65536, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "layer_types": None,
}  # fmt: skip
del _CONV["hidden_act"], _CONV["rms_norm_eps"]
LFM2 = _CONV | {
    "hidden_size": 2560, "intermediate_size": 12288, "full_attn_idxs": None, "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
}  # fmt: skip
LFM2_MOE = _CONV | {
    "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip
LFM3 = _CONV | {
    "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7, "sliding_window": 256,
    "use_sandwich_norm": True, "use_attention_gate": True, "attention_bias": False,
}  # fmt: skip


def older_dense(fields: Fields) -> Fields:
    """Return the fields of LFM2's config.json with the names of older files replaced by those of transformers."""
    return _renamed(fields, {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"})


def older_experts(fields: Fields) -> Fields:
    """Return the fields of the config.json of LFM2 with experts under the names that transformers uses now."""
    return _renamed(fields, {"tie_embedding": "tie_word_embeddings"})


def lfm3(fields: Fields) -> Fields:
    """Return the fields of LFM3's config.json with the epsilon of its norms, `rms_norm_eps`, renamed to `norm_eps`."""
    return _renamed(fields, {"rms_norm_eps": "norm_eps"})


def _renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    kept = {name: value for name, value in fields.items() if name not in names}
    return kept | {names[name]: value for name, value in fields.items() if name in names}
