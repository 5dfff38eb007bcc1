"""Families with short convolutions from GGUF files, from older directories, and the settings that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import TOKENS, TinyModel, forward, reference_logits
from tests.support.weights.gguf_conv import write_gguf
from tests.support.weights.gguf_models import byte_level_vocabulary
from tpi.errors import ModelError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Models = Callable[[str], TinyModel]


def logits(source: Path, target: Path, dtype: str = "f32") -> np.ndarray:
    pack_model(open_source(source), dtype, target)
    return np.asarray(forward(Pack.open(target), TOKENS))


@pytest.mark.parametrize("family", ["lfm2", "lfm2moe"])
def test_a_gguf_file_gives_the_logits_of_the_directory(family: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(tmp_path / "m.gguf", model, family, vocabulary=byte_level_vocabulary(model.directory))
    found = logits(tmp_path / "m.gguf", tmp_path / "a")
    np.testing.assert_allclose(found, reference_logits(model, TOKENS), atol=2e-4)
    np.testing.assert_allclose(found, logits(model.directory, tmp_path / "b"), atol=1e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_channels_keep_their_values(kind: str, tiny_model: Models, tmp_path: Path) -> None:
    """With `auto`, codes are kept; the same file packed in f32 has the same values."""
    model = tiny_model("lfm2")
    write_gguf(tmp_path / "m.gguf", model, "lfm2", lambda name: kind, byte_level_vocabulary(model.directory))
    exact, kept = (logits(tmp_path / "m.gguf", tmp_path / dtype, dtype) for dtype in ("f32", "auto"))
    assert np.abs(kept - exact).max() < 0.05 * np.ptp(exact)


def test_the_sliding_window_is_that_of_the_layers_that_attend(tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("lfm2")
    write_gguf(tmp_path / "m.gguf", model, "lfm2", vocabulary=byte_level_vocabulary(model.directory), window=5)
    assert open_source(tmp_path / "m.gguf").model.config.windows == (0, 5)


def rewritten(model: TinyModel, target: Path, changes: dict[str, Any], without: tuple[str, ...] = ()) -> Path:
    """Return a copy of a model's directory in `target`, with other fields in its config.json."""
    for file in model.directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    fields = json.loads((model.directory / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({name: fields[name] for name in fields if name not in without}))
    return target


def test_names_of_older_files(tiny_model: Models, tmp_path: Path) -> None:
    """Published directories list the layers with attention, and have other names for two fields."""
    model = tiny_model("lfm2")
    older = {"block_ff_dim": 160, "tie_embedding": True, "full_attn_idxs": [1], "rope_theta": 1000000.0}
    newer = ("layer_types", "tie_word_embeddings", "intermediate_size", "rope_parameters")
    directory = rewritten(model, tmp_path, older, newer)
    assert open_source(directory).model.config == open_source(model.directory).model.config


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("lfm2", {"conv_bias": True}, "conv_bias is true"),
        ("lfm2", {"conv_L_cache": 1}, "taps of its convolutions are 1"),
        ("lfm2", {"layer_types": ["conv", "conv"]}, "no layer has attention"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention"]}, "layers may be conv or full_attention"),
        ("lfm2", {"layer_types": ["conv"]}, "1 entries for 2 layers"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs is 1"),
        ("lfm2moe", {"num_experts_per_tok": 6}, "used of its experts is 6"),
        ("lfm2moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_unsupported_settings_are_named(
    family: str, changes: dict[str, Any], message: str, tiny_model: Models, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        open_source(rewritten(tiny_model(family), tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias is true"),
        ({"layer_types": ["conv", "chunked_attention", "conv"]}, "conv, full_attention or sliding_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "2 entries for 3 layers"),
        ({"use_attention_gate": 1}, "use_attention_gate"),
        ({"rope_parameters": {"full_attention": {}}}, "no object for sliding_attention"),
    ],
)
def test_unsupported_settings_of_lfm3_are_named(
    changes: dict[str, Any], message: str, tiny_model: Models, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        open_source(rewritten(tiny_model("lfm3"), tmp_path, changes))


def test_without_gate_and_sandwich_norms(tiny_model: Models, tmp_path: Path) -> None:
    """A file with these tensors is refused by their names, since its answers would be wrong without them."""
    changes = {"use_attention_gate": False, "use_sandwich_norm": False}
    with pytest.raises(ModelError, match="has tensors that lfm3 models do not have"):
        pack_model(open_source(rewritten(tiny_model("lfm3"), tmp_path, changes)), "f32", tmp_path / "pack")
