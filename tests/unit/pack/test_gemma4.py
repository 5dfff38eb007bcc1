"""Gemma 4 from GGUF files and from the directories of models that also take images and sound."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import GEMMA4, SIZES, TinyModel, forward, reference_logits
from tests.support.weights.gguf_gemma4 import write_gguf
from tpi.config import FullHeads
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

TOKENS = [1, 7, 200, 31, 5, 90, 14, 3, 3, 250, 61, 17, 2, 9, 11, 40]
Models = Callable[[str], TinyModel]


def logits(source: Path, target: Path, dtype: str = "f32") -> np.ndarray:
    pack_model(open_source(source), dtype, target)
    return np.asarray(forward(Pack.open(target), TOKENS))


def drawn(seed: int, more: dict[str, Any] | None = None) -> Any:
    """Return a random Gemma 4 in transformers whose settings llama.cpp's format can describe."""
    import torch
    import transformers

    rng = random.Random(seed)
    layers = rng.choice([1, 2, 4])
    share = rng.choice([{}, {"partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}])
    config = transformers.Gemma4TextConfig(**SIZES | GEMMA4 | {
        "num_hidden_layers": layers, "head_dim": rng.choice([8, 16]), "global_head_dim": rng.choice([16, 32]),
        "num_global_key_value_heads": rng.choice([1, 2, 3, None]), "attention_k_eq_v": rng.random() < 0.5,
        "sliding_window": rng.choice([3, 12, 100]), "final_logit_softcapping": rng.choice([None, 2.0]),
        "tie_word_embeddings": rng.random() < 0.5, "rms_norm_eps": rng.choice([1e-6, 0.1]),
        "layer_types": [*rng.choices(["sliding_attention", "full_attention"], k=layers - 1), "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": rng.choice([500.0, 1e6]), **share},
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0])},
        },
    } | ({
        "enable_moe_block": True, "num_experts": rng.choice([3, 5]), "top_k_experts": rng.choice([1, 2]),
        "moe_intermediate_size": rng.choice([32, 100]),
    } if seed % 2 else {}) | (more or {}))  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, values in model.state_dict().items():
            scale = values.shape[-1] ** -0.5 if values.dim() > 1 else 0.2
            values.copy_(torch.randn_like(values) * scale + (0 if values.dim() > 1 else 1))
            if name.endswith("layer_scalar"):
                values.abs_().add_(0.2)
    return model


@pytest.mark.parametrize("seed", range(24))
def test_a_gguf_file_gives_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    model = drawn(seed)
    write_gguf(tmp_path / "m.gguf", model, fused=seed % 4 == 1)
    expected = reference_logits(TinyModel(tmp_path, model), TOKENS)
    found = logits(tmp_path / "m.gguf", tmp_path / "a")
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(8))
def test_embeddings_of_layers_and_shared_keys_from_gguf(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kinds = ["sliding_attention"] * rng.choice([1, 2]) + ["full_attention"]
    after = [*rng.choices(["sliding_attention", "full_attention"], k=rng.choice([0, 2])), "full_attention"]
    model = drawn(seed, {
        "num_hidden_layers": len(kinds + after), "layer_types": kinds + after, "num_kv_shared_layers": len(after),
        "use_double_wide_mlp": rng.random() < 0.5, "hidden_size_per_layer_input": rng.choice([24, 40]),
        "vocab_size_per_layer_input": SIZES["vocab_size"],
    })  # fmt: skip
    write_gguf(tmp_path / "m.gguf", model)
    expected = reference_logits(TinyModel(tmp_path, model), TOKENS)
    found = logits(tmp_path / "m.gguf", tmp_path / "a")
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("keys", "leave_out", "message"),
    [
        ({"attention.shared_kv_layers": 1}, "", "attention.shared_kv_layers is 1, but the layers before"),
        ({"embedding_length_per_layer_input": 8}, "", "layer 0 lacks per_layer.gate, per_layer.norm, per_layer.proj"),
        ({"feed_forward_length": [160, 320]}, "", "feed_forward_length differs between layers"),
        ({"attention.head_count_kv": [3]}, "", "1 entries for 2 layers"),
        ({"attention.value_length_swa": 8}, "", "keys and values of different sizes"),
        ({"attn_logit_softcapping": 2.0}, "", "gemma4.attn_logit_softcapping"),
        ({}, "rope_freqs.weight", "rope_freqs.weight is missing"),
    ],
)
def test_gguf_files_that_are_not_supported_are_named(
    keys: dict[str, Any], leave_out: str, message: str, tiny_model: Models, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("gemma4").reference, keys, leave_out=leave_out)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path / "m.gguf")


def test_experts_with_a_norm_that_drops_values(tiny_model: Models, tmp_path: Path) -> None:
    """The router's input has a norm of its own, so it keeps values that the experts do not get."""
    import torch

    model = copy.deepcopy(tiny_model("gemma4moe").reference)
    with torch.no_grad():
        model.model.layers[0].pre_feedforward_layernorm_2.weight[::3] = 0
    write_gguf(tmp_path / "m.gguf", model)
    expected = reference_logits(TinyModel(tmp_path, model), TOKENS)
    np.testing.assert_allclose(logits(tmp_path / "m.gguf", tmp_path / "a"), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 1}, "no earlier layer of their kind has any"),
        ({"num_kv_shared_layers": 2}, "no earlier layer of their kind has any"),
        ({"num_kv_shared_layers": -1}, "no earlier layer of their kind has any"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}, "layer 0 lacks per_layer.gate"),
        ({"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input is 262144, not 320 as vocab_size"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is all"),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config has intermediate_size"),
        ({"per_layer_config": {"7": {"head_dim": 8}}}, "per_layer_config has 7"),
        ({"per_layer_config": [1]}, "not an object of objects"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "different heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "no object for sliding_attention layers"),
        ({"num_key_value_heads": 4}, "6 query heads are not a multiple of 4"),
        ({"sliding_window": None}, "sliding_window"),
        ({"enable_moe_block": True}, "num_experts"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    changes: dict[str, Any], message: str, tiny_model: Models, tmp_path: Path
) -> None:
    copied(tiny_model("gemma4").directory, tmp_path, changes)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)


def copied(directory: Path, target: Path, changes: dict[str, Any]) -> None:
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))


def test_heads_of_full_layers_by_their_published_names(tiny_model: Models, tmp_path: Path) -> None:
    """Published files name these heads once for the model; transformers writes them for each layer."""
    copied(tiny_model("gemma4").directory, tmp_path, GEMMA4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("per_layer_config") == {"1": {"head_dim": 32, "num_key_value_heads": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_source(tmp_path).model.config.full_heads == FullHeads(2, 32)
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_k_eq_v": False}))
    with pytest.raises(ModelError):  # without this, the number of KV heads does not change, and values have tensors
        pack_model(open_source(tmp_path), "f32", tmp_path / "pack")


@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
def test_the_text_part_of_a_model_that_takes_images(kind: str, tiny_model: Models, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = tiny_model("gemma4")
    weights = load_file(model.directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    others = ("audio_tower.x", "vision_tower.x", "embed_vision.pos_norm.bias", "embed_audio.x")
    renamed |= {f"model.{name}": np.zeros((2, 2), np.float32) for name in others}
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((model.directory / "config.json").read_text()) | {
        "model_type": "gemma4_text" if kind == "Gemma4" else "gemma4_unified_text",
        "use_bidirectional_attention": "vision",
    }
    if kind == "Gemma4Unified":
        for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"):
            del text[name]
    wrapped = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model.directory / name).read_bytes())
    assert any("images are not supported" in note for note in open_source(tmp_path).model.notes)
    np.testing.assert_array_equal(logits(tmp_path, tmp_path / "a"), logits(model.directory, tmp_path / "b"))
