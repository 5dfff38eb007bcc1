"""Families with Mamba2 layers from GGUF files, and the settings that are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from master.deployment.planner import deal_shards, units_of
from tests.support.models import MAMBA, SIZES, TOKENS, TinyModel, forward, reference_logits
from tests.support.weights.gguf_mamba import write_gguf
from tests.support.weights.gguf_models import byte_level_vocabulary
from tpi.config import ModelConfig
from tpi.errors import ModelError, PlanError
from tpi.families.huggingface.reader import from_huggingface
from tpi.kernels.memory import buffer_bytes
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Models = Callable[[str], TinyModel]
HYBRID: dict[str, Any] = SIZES | MAMBA | {"architectures": ["GraniteMoeHybridForCausalLM"]}


def logits(source: Path, target: Path, dtype: str = "f32") -> np.ndarray:
    pack_model(open_source(source), dtype, target)
    return np.asarray(forward(Pack.open(target), TOKENS))


def config_of(**changes: Any) -> ModelConfig:
    return from_huggingface(HYBRID | changes, lambda name: "lm_head" not in name, "somewhere").config


@pytest.mark.parametrize("family", ["granite4h", "granite4hmoe"])
def test_a_gguf_file_gives_the_logits_of_the_directory(family: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(tmp_path / "m.gguf", model, vocabulary=byte_level_vocabulary(model.directory))
    found = logits(tmp_path / "m.gguf", tmp_path / "a")
    np.testing.assert_allclose(found, reference_logits(model, TOKENS), atol=1e-4)
    np.testing.assert_allclose(found, logits(model.directory, tmp_path / "b"), atol=1e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["granite4h", "granite4hmoe"])
def test_quantised_heads_keep_their_values(kind: str, family: str, tiny_model: Models, tmp_path: Path) -> None:
    """With `auto`, codes are kept; the same file packed in f32 has the same values."""
    model = tiny_model(family)
    kinds = {True: "F32", False: kind}  # rows of 172 values cannot be quantised
    write_gguf(tmp_path / "m.gguf", model, lambda name: kinds["down" in name], byte_level_vocabulary(model.directory))
    exact, kept = (logits(tmp_path / "m.gguf", tmp_path / dtype, dtype) for dtype in ("f32", "auto"))
    assert np.abs(kept - exact).max() < 0.05 * np.ptp(exact)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_proj_bias": True}, "mamba_proj_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; Mamba2 layers are supported with silu"),
        ({"mamba_d_head": 16}, "mamba_n_heads 6 times mamba_d_head 16 is not 192"),
        ({"mamba_d_conv": 1}, "taps of its Mamba2 layers is 1"),
        ({"mamba_n_groups": 4}, "6 value heads are not a multiple of 4 key heads"),
        ({"time_step_limit": [0.5, 0.1]}, r"time_step_limit is \[0.5, 0.1\]; expected are two numbers"),
        ({"time_step_limit": None}, "time_step_limit is null"),
        ({"layer_types": ["mamba", "mamba"]}, "no layer has attention"),
        ({"layer_types": None}, "no layer has attention"),
        ({"layer_types": ["mamba", "sliding_attention"]}, "layers may be mamba or attention"),
        ({"layer_types": ["mamba"]}, "1 entries for 2 layers"),
        ({"rms_norm_eps": -1e-5}, "norm_eps of its Mamba2 layers is -1e-05"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(**changes)


def test_limits_of_step_sizes() -> None:
    """The limits are numbers, or infinity as transformers writes it."""
    for given, limits in (([0.1, 0.5], (0.1, 0.5)), ([0.0, {"__float__": "Infinity"}], (0.0, 0.0))):
        mamba = config_of(time_step_limit=given).mamba
        assert mamba is not None
        assert (mamba.least_step, mamba.most_step) == limits


def test_heads_that_are_normed_together_stay_together(tiny_pack: Callable[..., Pack]) -> None:
    """If all heads of a layer are one such group, each may be on a node of its own."""
    with pytest.raises(PlanError, match="3 units of recurrent layers, too few for 4 nodes"):
        deal_shards(tiny_pack("granite4h").config, units_of(tiny_pack("granite4h")), [1, 1, 1, 1])
    pack = tiny_pack("granite4hmoe")
    shards = deal_shards(pack.config, units_of(pack), [1, 1, 1, 1])
    assert {(shard.key.first, shard.key.last) for shard in shards} == {(0, 1)}


def test_buffers_of_heads_are_counted() -> None:
    config = config_of(num_local_experts=0)
    assert config.mamba is not None
    wide = replace(config, mamba=replace(config.mamba, value=1024))
    channels = 2 * wide.mamba.key + 6 * 1024  # type: ignore[union-attr]
    assert buffer_bytes(wide, 6, 1, 0) >= 4 * (2 * channels + 3 * 6 * 1024)
