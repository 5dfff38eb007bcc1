"""Small model shapes for tests."""

from dataclasses import replace
from typing import Any

from tpi.config import ModelConfig

_TINY = ModelConfig(
    family="llama",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=100,
    context=128,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
    gated=True,
    inv_freq=tuple(10000.0 ** -(i / 8) for i in range(8)),
    attention_scale=0.25,
)


def tiny_config(**changes: Any) -> ModelConfig:
    """Return the configuration of a two-layer Llama, with `changes`."""
    return replace(_TINY, **changes)
