"""Defaults of config.json for the families of this folder, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.afternorm.defaults import EXAONE4
from tpi.families.base import Fields
from tpi.families.dense import defaults as dense
from tpi.families.dense.defaults import ERNIE as DENSE_ERNIE
from tpi.families.huggingface.defaults import COMMON
from tpi.families.huggingface.expertdefaults import GRANITE, num_local_experts, renamed

GLM4: dict[str, Any] = COMMON | {
    "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    "attention_bias": False, "use_qk_norm": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "num_mtp_layers": 1,
}  # fmt: skip
MINIMAX: dict[str, Any] = COMMON | {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
    "rope_theta": 5000000.0, "partial_rotary_factor": 1.0, "num_experts_per_tok": 8, "num_local_experts": 256,
    # Fields of model files alone. With other values they describe variants that transformers does not have:
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0, "attn_type_list": None,
}  # fmt: skip
ERNIE: dict[str, Any] = DENSE_ERNIE | {
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}  # fmt: skip
EXAONE: dict[str, Any] = {name: value for name, value in EXAONE4.items() if name != "head_dim"} | {
    "head_dim": None, "mlp_layer_types": None, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
    "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    # Fields of model files alone. With other values they describe variants that transformers does not have:
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "mtp_layer_types": None,
}  # fmt: skip
GRANITE_SHARED: dict[str, Any] = GRANITE | {"shared_intermediate_size": 0}
HUNYUAN: dict[str, Any] = dense.HUNYUAN | {"num_experts": 1, "moe_topk": 1}


def glm4(fields: Fields) -> dict[str, Any]:
    """Return the fields with two older names replaced: `num_local_experts` and `num_nextn_predict_layers`.

    Raises:
        ModelError: if a field is present under both names with different values.
    """
    found = renamed(fields, "num_local_experts", "n_routed_experts")
    return renamed(found, "num_nextn_predict_layers", "num_mtp_layers")


def minimax(fields: Fields) -> dict[str, Any]:
    """Return the fields with one name for the number of experts, and `rotary_dim` converted to a share of a head.

    Raises:
        ModelError: if the number of experts is present under two names with different values.
    """
    found = num_local_experts(fields)
    rotary, size = found.pop("rotary_dim", None), found.get("head_dim", MINIMAX["head_dim"])
    if isinstance(rotary, int) and isinstance(size, int) and size > 0:
        found.setdefault("partial_rotary_factor", rotary / size)
    return found


def ernie(fields: Fields) -> dict[str, Any]:
    """Return the fields with one name for the number of experts, and for that of chosen experts.

    Raises:
        ModelError: if a field is present under both names with different values.
    """
    return renamed(renamed(fields, "num_experts", "moe_num_experts"), "num_experts_per_tok", "moe_k")


def hunyuan(fields: Fields) -> dict[str, Any]:
    """Return the fields with one name for each number of experts, one value for all layers, and a scaled rotary base.

    Raises:
        ModelError: if a field is present under two names with different values, or layers differ in their experts.
    """
    found = renamed(renamed(fields, "num_experts_per_tok", "moe_topk"), "num_local_experts", "num_experts")
    for name in ("moe_topk", "num_experts"):
        listed = found.get(name)
        if isinstance(listed, list) and listed:
            if any(value != listed[0] for value in listed):
                raise ModelError(f"{name} is {str(listed)[:80]}: layers with different numbers are not supported")
            found[name] = listed[0]
    return dense.hunyuan(found)
