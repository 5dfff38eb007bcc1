"""Families with DeltaNet layers from GGUF files and from the fused tensors of published directories."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import TinyModel, forward
from tests.support.weights.gguf_delta import write_gguf
from tests.support.weights.gguf_models import byte_level_vocabulary
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

TOKENS = [1, 7, 200, 31, 5, 90, 14]
Models = Callable[[str], TinyModel]


def logits(source: Path, target: Path, dtype: str = "f32") -> np.ndarray:
    pack_model(open_source(source), dtype, target)
    return np.asarray(forward(Pack.open(target), TOKENS))


@pytest.mark.parametrize("family", ["qwen35", "qwen3next", "qwen35moe"])
def test_a_gguf_file_gives_the_logits_of_the_directory(family: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(tmp_path / "m.gguf", model, family, vocabulary=byte_level_vocabulary(model.directory))
    np.testing.assert_allclose(
        logits(tmp_path / "m.gguf", tmp_path / "a"), logits(model.directory, tmp_path / "b"), atol=1e-5
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_columns_are_read_in_the_order_of_the_heads(kind: str, tiny_model: Models, tmp_path: Path) -> None:
    """With `auto`, codes are kept; the same file packed in f32 has the same values."""
    model = tiny_model("qwen35")
    write_gguf(tmp_path / "m.gguf", model, "qwen35", lambda name: kind, byte_level_vocabulary(model.directory))
    exact, kept = (logits(tmp_path / "m.gguf", tmp_path / dtype, dtype) for dtype in ("f32", "auto"))
    assert np.abs(kept - exact).max() < 0.05 * np.ptp(exact)


def test_fused_experts_of_published_directories(tiny_model: Models, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model, fused = tiny_model("qwen35moe"), tmp_path / "fused"
    fused.mkdir()
    weights = load_file(model.directory / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        each = [
            {part: weights.pop(f"{at}{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for expert in range(5)
        ]
        weights[f"{at}gate_up_proj"] = np.stack([np.concatenate([one["gate"], one["up"]]) for one in each])
        weights[f"{at}down_proj"] = np.stack([one["down"] for one in each])
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    save_file(renamed | {"mtp.fc.weight": np.zeros((2, 2), np.float32)}, fused / "model.safetensors")
    config = json.loads((model.directory / "config.json").read_text())
    wrapped = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": config,
        "vision_config": {}, "tie_word_embeddings": False,
    }  # fmt: skip
    (fused / "config.json").write_text(json.dumps(wrapped))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (fused / name).write_bytes((model.directory / name).read_bytes())
    np.testing.assert_array_equal(logits(fused, tmp_path / "a"), logits(model.directory, tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layers may be linear or full"),
        ({"layer_types": ["linear_attention"]}, "1 entries for 2 layers"),
        ({"linear_num_value_heads": 5}, "5 value heads are not a multiple of 2"),
        ({"linear_conv_kernel_dim": 1}, "taps"),
    ],
)
def test_unsupported_settings_are_named(
    changes: dict[str, object], message: str, tiny_model: Models, tmp_path: Path
) -> None:
    directory = tiny_model("qwen35").directory
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path)
