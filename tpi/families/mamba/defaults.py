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


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Return the fields with `layers_block_type` renamed to `layer_types`, whose kinds have two names too.

    Raises:
        ModelError: if both fields are present and differ.
    """
    return renamed(fields, "layers_block_type", "layer_types")
