"""Defaults of config.json for the families of this folder, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, float_field
from tpi.families.huggingface.defaults import COMMON, LLAMA
from tpi.families.settings import head_size

GEMMA: dict[str, Any] = COMMON | {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
ARCEE: dict[str, Any] = LLAMA | {
    "hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
SEED_OSS: dict[str, Any] = LLAMA | {
    "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
    "attention_out_bias": False,
}  # fmt: skip
ERNIE: dict[str, Any] = COMMON | {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0, "use_bias": False,
}  # fmt: skip
MINISTRAL3: dict[str, Any] = COMMON | {
    "vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": None,
    "llama_4_scaling_beta": None,
}  # fmt: skip
HUNYUAN: dict[str, Any] = COMMON | {"vocab_size": 290943, "rms_norm_eps": 1e-5, "attention_bias": False}
_MOST_ALPHA = 1e9
_MINISTRAL3_ROPE: dict[str, Any] = {
    "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def ministral3(fields: Fields) -> dict[str, Any]:
    """Return the fields with `llama_4_scaling_beta` moved out of the object with the parameters of RoPE.

    If the object is missing, its default is used. Its `max_position_embeddings` is removed, since it has no effect.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    found = fields.get(name)
    rope = _MINISTRAL3_ROPE if found is None else found
    if not isinstance(rope, dict):
        return dict(fields)
    kept = {key: value for key, value in rope.items() if key not in ("llama_4_scaling_beta", "max_position_embeddings")}
    return {**fields, name: kept, "llama_4_scaling_beta": rope.get("llama_4_scaling_beta")}


def hunyuan(fields: Fields) -> dict[str, Any]:
    """Return the fields with a rotary base that is scaled by `alpha`, in place of an object of the kind `dynamic`.

    The base becomes `rope_theta * alpha ** (d / (d - 2))` with heads of d values, whatever the length of a sequence
    (NTK-aware scaling, as in Hunyuan's own code).

    Raises:
        ModelError: if a number is missing or out of range.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name)
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return dict(fields)
    size, alpha = head_size(HUNYUAN | dict(fields)), float_field(rope, "alpha")
    theta = float_field({"rope_theta": rope.get("rope_theta", fields.get("rope_theta"))}, "rope_theta", 10000.0)
    if size <= 2 or not 0 < alpha < _MOST_ALPHA:
        raise ModelError(f"alpha of {name} is {alpha} with heads of {size} values, which is not supported")
    scaled = {"rope_type": "default", "rope_theta": theta * alpha ** (size / (size - 2))}
    return {key: value for key, value in fields.items() if key != "rope_scaling"} | {"rope_parameters": scaled}
