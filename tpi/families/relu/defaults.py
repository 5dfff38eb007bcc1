"""Defaults of config.json for the families with ReLU, like those in `tpi.families.huggingface.defaults`.

transformers has no classes for Bamboo and ProSparse. Their defaults are Mistral's and Llama's, with another activation.
"""

from typing import Any

from tpi.families.huggingface import defaults

BAMBOO = defaults.MISTRAL | {"hidden_act": "relu"}
PROSPARSE = defaults.LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": None}
NEMOTRON: dict[str, Any] = defaults.LLAMA | {
    "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
    "max_position_embeddings": 4096, "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
}  # fmt: skip
del NEMOTRON["rms_norm_eps"]
