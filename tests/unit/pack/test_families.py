"""Every family computes what transformers computes, and unsupported settings are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgpack import packb, unpackb

from tests.support.models import (
    LLAMA3,
    MODELS,
    SIZES,
    TOKENS,
    TinyModel,
    forward,
    last_logits,
    reference_logits,
)
from tpi.calibration.forward import Run
from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.huggingface.reader import from_huggingface
from tpi.families.table import FAMILIES
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.builder.plan import plan_pack
from tpi.pack.reader import Pack

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **SIZES}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.7, "beta_fast": 16, "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0 + j / 8 for j in range(8)], "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(
    name: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[[str], Pack]
) -> None:
    import torch

    with torch.no_grad():
        expected = tiny_model(name).reference(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(forward(tiny_pack(name), TOKENS, open_kernels("reference")), expected, atol=1e-4)


@pytest.mark.parametrize("name", [*MODELS, "gemma4e"])
def test_calibration_computes_what_transformers_computes(
    name: str, tiny_model: Callable[[str], TinyModel], tiny_pack: Callable[[str], Pack]
) -> None:
    opened = open_source(tiny_model(name).directory)
    plan = plan_pack(opened.model, opened.source, "q4")
    run = Run(opened.model.config, plan, opened.source, TOKENS)
    for layer, blocks in enumerate(plan.layers):
        for block in blocks:
            parts = {(each.layout.name, part.name) for each in block.runs for part in each.layout.parts}
            importance = run.block(layer, block)
            assert {(name, part) for name, _, part in importance} <= parts
            assert ("o" in {part for _, _, part in importance}) == any(part == "o" for _, part in parts)
    found = last_logits(tiny_pack(name), run.x, open_kernels("reference"))
    np.testing.assert_allclose(found, reference_logits(tiny_model(name), TOKENS), atol=1e-4)
    opened.source.close()


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_equals_that_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 10000.0, **ROPES[name]}
    reference = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(parameters)))
    for fields in (
        {"rope_parameters": parameters},
        {"rope_theta": 10000.0, "rope_scaling": dict(ROPES[name])},
    ):
        config = from_huggingface(LLAMA | fields, lambda name: True, "test").config
        np.testing.assert_allclose(config.inv_freq, reference.inv_freq.numpy(), rtol=3e-7)
        assert config.rope_scale == pytest.approx(reference.attention_scaling, rel=1e-7)
    assert config.context == 256


def test_window_of_every_layer() -> None:
    def windows(architecture: str, **fields: Any) -> tuple[int, ...]:
        return from_huggingface(
            {"architectures": [architecture], **SIZES, **fields}, lambda name: True, "t"
        ).config.windows

    assert windows("MistralForCausalLM", sliding_window=None) == ()
    assert windows("MistralForCausalLM", sliding_window=8) == (8, 8)
    assert windows("Qwen2ForCausalLM", sliding_window=8, max_window_layers=1) == ()
    assert windows("Qwen2ForCausalLM", sliding_window=8, max_window_layers=1, use_sliding_window=True) == (0, 8)
    assert windows("Gemma2ForCausalLM", sliding_window=8) == (8, 0)
    assert windows("Phi3ForCausalLM", sliding_window=8) == (8, 8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "OPTForCausalLM"]),
        ({"architectures": None}, ["none", "LlamaForCausalLM"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": 1 << 40}, ["hidden_size"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 4}, ["6", "4"]),
        ({"hidden_act": "quick_gelu"}, ["quick_gelu", "silu"]),
        ({"hidden_act": ["silu"]}, ["['silu']", "silu"]),
        ({"hidden_act": "x" * 10_000_000}, ["xxx is not supported"]),
        ({"hidden_size": "x" * 10_000_000}, ["xxx in the model's configuration"]),
        ({"rope_scaling": {"rope_type": "magic"}}, ["magic", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"rope_theta": -1.0}, ["rotary"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantised"]),
        ({"architectures": ["OPTForCausalLM"], "ffn_dim": 64, "do_layer_norm_before": False}, ["350m"]),
        ({"architectures": ["OPTForCausalLM"], "ffn_dim": 64, "word_embed_proj_dim": 48}, ["projects"]),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        from_huggingface(LLAMA | fields, lambda name: True, "somewhere")
    assert all(word in str(caught.value) for word in ["somewhere", *words])


@settings(max_examples=300, deadline=None)
@example("LlamaForCausalLM", {"rope_theta": 2.5e-228})
@example("GraniteMoeHybridForCausalLM", {"hidden_size": "wide"})
@given(
    st.sampled_from([name for family in FAMILIES for name in family.architectures]),
    st.dictionaries(
        st.sampled_from([*SIZES, "head_dim", "rope_theta", "rope_scaling", "sliding_window", "layer_types", "ffn_dim",
                         "rms_norm_eps", "query_pre_attn_scalar", "use_sliding_window", "rope_parameters",
                         "partial_rotary_factor", "original_max_position_embeddings", "no_rope_layers",
                         "no_rope_layer_interval", "sliding_window_pattern", "rope_local_base_freq",
                         "residual_multiplier", "logits_scaling", "embedding_multiplier", "attention_bias",
                         "tie_word_embeddings", "max_window_layers", "is_causal", "text_config"]),
        st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70)
        | st.just(10**400) | st.integers(-2, 300) | st.floats() | st.text()
        | st.lists(st.integers(-1, 9), max_size=3)
        | st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "llama3", "yarn", "longrope"]),
                                 "factor": st.none() | st.floats() | st.text()}),
        max_size=4,
    ),
)  # fmt: skip
def test_any_configuration_is_a_model_or_a_model_error(architecture: str, fields: dict[str, Any]) -> None:
    try:
        model = from_huggingface({**LLAMA, "architectures": [architecture], **fields}, lambda name: True, "test")
    except ModelError:
        return
    assert len(model.layers) == model.config.layers
    assert ModelConfig.from_dict(unpackb(packb(model.config.to_dict()), use_list=True)) == model.config


def test_missing_tensor_is_named(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = tiny_model("qwen2").directory
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.self_attn\.k_proj\.bias"):
        pack_model(open_source(tmp_path), "f32", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_shape_is_named(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    source = tiny_model("llama").directory
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \[160, 96\].*\[192, 96\]"):
        pack_model(open_source(tmp_path), "f32", tmp_path / "out")
