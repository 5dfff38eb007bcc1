"""Defaults of config.json for the families of this folder, like those in `tpi.families.huggingface.defaults`."""

from typing import Any

from tpi.families.huggingface.defaults import COMMON

OLMO2: dict[str, Any] = COMMON | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}
OLMO3: dict[str, Any] = OLMO2 | {"rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None}
EXAONE4: dict[str, Any] = COMMON | {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None,
}  # fmt: skip
