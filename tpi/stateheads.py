"""Kernel specs of a node's heads in blocks with states (DeltaNet, Mamba2), from the block's vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.config import Mamba, ModelConfig
from tpi.kernels.spec import DeltaSpec, HeadsSpec, MambaSpec, NormSpec, SpreadNorm
from tpi.pack.layout import RunLayout
from tpi.partition import Range

F32 = npt.NDArray[np.float32]


def spread_norm(config: ModelConfig) -> SpreadNorm | None:
    """Return the norm that the model's recurrent blocks have over the heads of all nodes; None if they have none."""
    mamba = config.mamba
    if mamba is None or mamba.key_heads > 1:
        return None
    return SpreadNorm(mamba.heads * mamba.value, mamba.norm_eps)


def heads_spec(
    config: ModelConfig, runs: Sequence[tuple[RunLayout, Range]], vectors: Mapping[str, F32], norm: NormSpec
) -> HeadsSpec:
    """Return the spec of some units of a block with heads.

    `runs` has the layout and the units of the run `value`, then those of the run `key`. The layouts are those of the
    whole block. The units of `key` must hold the key head of every value head. `norm` is that of the block's input.
    """
    settings, ((values, value_units), (keys, key_units)) = config.state_heads, runs
    assert settings is not None  # a model with blocks of this kind has these settings
    heads = value_units.scaled(values.width // settings.value, settings.heads)
    key_heads = key_units.scaled(keys.width // settings.key, settings.key_heads)
    group = settings.heads // settings.key_heads
    log = vectors.get("decay.log")

    def cut(vector: F32, part: Range, width: int) -> F32:
        return np.ascontiguousarray(vector[part.first * width : part.last * width])

    def convolution(name: str, part: Range, width: int) -> F32:
        return cut(vectors[f"conv.{name}"], part, width * settings.taps).reshape(-1, settings.taps)

    shared: dict[str, Any] = {
        "values": replace(values, units=len(value_units)),
        "keys": replace(keys, units=len(key_units)),
        "heads": len(heads),
        "key_heads": len(key_heads),
        "key": settings.key,
        "value": settings.value,
        "taps": settings.taps,
        "key_index": np.arange(heads.first, heads.last, dtype=np.int32) // group - key_heads.first,
        "norm": norm,
        "a": cut(vectors["a"], heads, config.hidden).reshape(-1, config.hidden),
        "decay": cut(vectors["decay"] if log is None else -np.exp(log), heads, 1),
        "decay_bias": cut(vectors["decay.bias"], heads, 1),
        "conv_q": convolution("q", key_heads, settings.key),
        "conv_k": convolution("k", key_heads, settings.key),
        "conv_v": convolution("v", heads, settings.value),
    }
    if not isinstance(settings, Mamba):
        b = cut(vectors["b"], heads, config.hidden).reshape(-1, config.hidden)
        return DeltaSpec(**shared, b=b, out_norm=vectors["out_norm"])
    parts = (("q", key_heads, settings.key), ("k", key_heads, settings.key), ("v", heads, settings.value))
    biases = [cut(vectors[f"conv.{name}.bias"], own, width) for name, own, width in parts if "conv.v.bias" in vectors]
    return MambaSpec(
        **shared,
        skip=cut(vectors["skip"], heads, 1),
        least_step=settings.least_step,
        most_step=settings.most_step or np.inf,
        conv_bias=np.concatenate(biases) if biases else None,
        out_norm=cut(vectors["out_norm"], heads, settings.value),
        out_eps=settings.norm_eps,
        spread=spread_norm(config),
    )
