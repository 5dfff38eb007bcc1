"""Models with published configurations, and variants that are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.cluster.inprocess import in_process_engine
from tests.support.models import LLAMA3, SIZES, TinyModel, forward, write_tokenizer
from tpi.config import ModelConfig
from tpi.errors import ModelError, UsageError
from tpi.families.base import Model
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Tiny = Callable[[str], TinyModel]
TOKENS = [1, *np.random.default_rng(5).integers(3, 320, 40).tolist()]
FACTORS = {f"{side}_factor": [start + j / 8 for j in range(8)] for side, start in (("short", 1.0), ("long", 3.0))}
LONGROPE: dict[str, Any] = {"type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **FACTORS}
# What the published files say, where it matters.
PHI4: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "max_position_embeddings": 16384, "rope_scaling": None,
    "original_max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-05, "model_type": "phi3",
}  # fmt: skip
GEMMA3: dict[str, Any] = {  # 4b, with its vision tower
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip
MISTRAL31: dict[str, Any] = {  # Small 3.1, with its vision tower
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_attention_heads": 32,
                    "num_hidden_layers": 40, "num_key_value_heads": 8, "intermediate_size": 32768,
                    "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
                    "max_position_embeddings": 131072},
}  # fmt: skip
QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "num_hidden_layers": 28, "max_window_layers": 28, "sliding_window": 131072,
    "use_sliding_window": False, "rope_theta": 1000000.0, "vocab_size": 152064, "use_mrope": False,
}  # fmt: skip


def model_of(fields: dict[str, Any], has: Callable[[str], bool] = lambda name: "lm_head" not in name) -> Model:
    return from_huggingface(fields, has, "somewhere")


def config_of(fields: dict[str, Any]) -> ModelConfig:
    return model_of(fields).config


def llama(**fields: Any) -> ModelConfig:
    return config_of({"architectures": ["LlamaForCausalLM"], **SIZES, **fields})


def test_published_models_are_what_they_say() -> None:
    phi4 = config_of(PHI4)
    assert (phi4.head_dim, phi4.windows, len(phi4.inv_freq), phi4.long_inv_freq) == (128, (), 64, ())
    gemma3 = config_of(GEMMA3)
    assert (gemma3.heads, gemma3.kv_heads, gemma3.head_dim, gemma3.vocab) == (8, 4, 256, 262208)
    assert gemma3.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert gemma3.rope(5)[0][1] == pytest.approx(1e6 ** (-1 / 128) / 8)
    assert gemma3.rope(6)[0][1] == pytest.approx(1e4 ** (-1 / 128))
    mistral = config_of(MISTRAL31)
    assert (mistral.family, mistral.head_dim, mistral.windows, mistral.norm_eps) == ("mistral", 128, (), 1e-5)
    assert config_of(QWEN25).windows == ()


def test_a_vision_tower_is_left_out_and_said_to_be() -> None:
    model = model_of(GEMMA3, lambda name: name.startswith("language_model.model."))
    assert model.embedding.tensor == "language_model.model.embed_tokens.weight"
    assert any("images are not supported" in note for note in model.notes)
    assert "vision_tower.*" in model.ignored_tensors


def test_a_wrapper_computes_what_its_text_model_does(tiny_model: Tiny, tmp_path: Path) -> None:
    plain = tiny_model("gemma3")
    for file in plain.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = json.loads((plain.directory / "config.json").read_text())
    wrapped = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    tensors = load_file(plain.directory / "model.safetensors")
    moved = {f"language_model.{name}": values for name, values in tensors.items()}
    tower = {"vision_tower.x.weight": np.ones(4, np.float32), "multi_modal_projector.y": np.ones(4, np.float32)}
    save_file(moved | tower, tmp_path / "model.safetensors")
    pack_model(open_source(tmp_path), "f32", tmp_path / "pack")
    pack_model(open_source(plain.directory), "f32", tmp_path / "plain")
    expected = forward(Pack.open(tmp_path / "plain"), TOKENS)
    np.testing.assert_array_equal(forward(Pack.open(tmp_path / "pack"), TOKENS), expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["PhimoeForCausalLM"]}, ["router", "LlamaForCausalLM"]),
        ({"architectures": ["Olmo3ForCausalLM"], "rope_theta": 10000.0}, ["rope_theta is 10000.0", "rope_parameters"]),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"}, ["sliding_window_pattern is 'L"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["text_config"]),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "x"}}, ["type 'x'"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps is null"]),
        ({"is_causal": False}, ["is_causal"]),
        ({"pruned_heads": {"0": [1]}}, ["pruned_heads"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, ["use_bidirectional"]),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 2}, ["layer_types"]),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, ["1 entries for 2 layers"]),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [2, 0]}, ["no_rope_layers"]),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.0}, ["residual_multiplier"]),
    ],
)
def test_variants_that_cannot_be_are_refused_by_name(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        config_of({"architectures": ["LlamaForCausalLM"], **SIZES, **fields})
    assert all(word in str(caught.value) for word in words)


def test_rope_scaling_wins_over_rope_parameters() -> None:
    other = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    both = llama(rope_parameters=LLAMA3, rope_scaling=dict(other))
    assert both == llama(rope_parameters=other)
    assert both.inv_freq != llama(rope_parameters=LLAMA3).inv_freq
    assert llama(rope_parameters=LLAMA3, rope_scaling=None) == llama(rope_parameters=LLAMA3)


def test_an_original_context_outside_of_the_parameters_wins() -> None:
    inside = {**LLAMA3, "original_max_position_embeddings": 32}
    assert llama(rope_parameters=inside, original_max_position_embeddings=64) == llama(rope_parameters=LLAMA3)


def test_llama_ignores_partial_rotation_as_transformers_does() -> None:
    assert llama(partial_rotary_factor=0.5).inv_freq == llama().inv_freq


def test_missing_fields_have_the_family_default_and_null_is_none() -> None:
    gemma = {"architectures": ["Gemma2ForCausalLM"], **SIZES}
    assert (config_of(gemma).attention_softcap, config_of(gemma).logit_softcap) == (50.0, 30.0)
    none = config_of(gemma | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None})
    assert (none.attention_softcap, none.logit_softcap, none.windows) == (0.0, 0.0, ())
    assert config_of({"architectures": ["Phi3ForCausalLM"], **SIZES}).norm_eps == 1e-5


def test_unread_fields_are_named(tiny_model: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_model("llama").directory
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"logit_scale": 3.0, "clip_qkv": None}))
    pack_model(open_source(source), "f32", tmp_path / "quiet")
    assert "ignored" not in capsys.readouterr().err
    pack_model(open_source(tmp_path), "f32", tmp_path / "pack")
    assert "that mean nothing for llama models are ignored: clip_qkv, logit_scale\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, ["rope_scaling.mrope_section"]),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, ["rope_parameters.factor"]),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_parameters"]),
        ({"partial_rotary_factor": 0.5, "use_mrope": False}, ["use_mrope", "partial_rotary_factor"]),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
         ["rope_parameters.original_max_position_embeddings"]),
        ({"rope_parameters": LLAMA3, "partial_rotary_factor": None, "torch_dtype": "float32"}, []),
    ],
)  # fmt: skip
def test_what_does_not_count_is_named(fields: dict[str, Any], names: list[str]) -> None:
    notes = model_of({"architectures": ["LlamaForCausalLM"], **SIZES, **fields}).notes
    assert [note.partition(": ")[2] for note in notes] == ([", ".join(names)] if names else [])


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Any]:
    """Return a Phi-3 whose original context of 24 tokens is stretched to 64, and the same model in transformers."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("longrope")
    sizes = SIZES | {"max_position_embeddings": 64, "original_max_position_embeddings": 24}
    config = transformers.Phi3Config(**sizes, rope_parameters=dict(LONGROPE))
    torch.manual_seed(1)
    model = transformers.Phi3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    pack_model(open_source(directory), "f32", directory / "pack")
    return Pack.open(directory / "pack"), model


@pytest.mark.parametrize("length", [20, 23, 25, 41])
@pytest.mark.parametrize("shares", [[1], [1, 2]])
def test_longrope_beyond_its_original_context(
    length: int, shares: list[float], longrope: tuple[Pack, Any], tmp_path: Path
) -> None:
    import torch

    pack, model = longrope
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS[:length]]), use_cache=False).logits[0].numpy()
    context = 24 if length <= 24 else 64
    with in_process_engine(pack, shares, tmp_path, context=context) as engine:
        logits = engine.logits(TOKENS[:length])
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_prompt_over_the_models_context_gets_no_useless_advice(longrope: tuple[Pack, Any], tmp_path: Path) -> None:
    pack, _ = longrope
    for context, words in ((24, "raise -c"), (64, "all that this model was made for; shorten it")):
        with in_process_engine(pack, [1], tmp_path / str(context), context=context) as engine:
            with pytest.raises(UsageError, match=words) as caught:
                engine.admit([1] * 70)
            assert ("raise -c" in str(caught.value)) == (context == 24)
