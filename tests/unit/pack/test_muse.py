"""Muse Glimmer: the text model inside a model with vision, its GGUF files, and the settings that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import SIZES, TOKENS, TinyModel, forward, reference_logits
from tests.support.weights.gguf_entries import write_gguf
from tests.support.weights.gguf_models import byte_level_vocabulary
from tpi.errors import ModelError
from tpi.families.base import Model
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Models = Callable[[str], TinyModel]


def model_of(**changes: Any) -> Model:
    text = SIZES | {"model_type": "muse_glimmer_text", "num_hidden_layers": 6} | changes
    fields = {"architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": text}
    return from_huggingface(fields, lambda name: "lm_head" not in name, "somewhere")


def logits(source: Path, target: Path, dtype: str = "f32") -> np.ndarray:
    pack_model(open_source(source), dtype, target)
    return np.asarray(forward(Pack.open(target), TOKENS))


def with_epsilon(directory: Path, target: Path, epsilon: float) -> Path:
    """Return a copy of a model with another epsilon of its post norms."""
    shutil.copytree(directory, target)
    fields = json.loads((target / "config.json").read_text())
    fields["text_config"]["post_norm_eps"] = epsilon
    (target / "config.json").write_text(json.dumps(fields))
    return target


def test_a_gguf_file_gives_the_logits_of_the_directory(tiny_model: Models, tmp_path: Path) -> None:
    """In a file, the epsilon of post norms is llama.cpp's, so the directory gets the same one."""
    model = tiny_model("museglimmer")
    write_gguf(tmp_path / "m.gguf", model, "muse-glimmer", vocabulary=byte_level_vocabulary(model.directory))
    found = logits(tmp_path / "m.gguf", tmp_path / "a")
    directory = with_epsilon(model.directory, tmp_path / "d", 1e-8)
    np.testing.assert_allclose(found, logits(directory, tmp_path / "b"), atol=1e-5)
    assert np.abs(found - reference_logits(model, TOKENS)).max() > 1e-3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_heads_keep_their_values(kind: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("museglimmer")
    kinds = {True: "F32", False: kind}  # rows of 100 values cannot be quantised
    vocabulary = byte_level_vocabulary(model.directory)
    write_gguf(tmp_path / "m.gguf", model, "muse-glimmer", lambda name: kinds["down" in name], vocabulary)
    exact, kept = (logits(tmp_path / "m.gguf", tmp_path / dtype, dtype) for dtype in ("f32", "auto"))
    assert np.abs(kept - exact).max() < 0.05 * np.ptp(exact)


def test_every_fourth_layer_from_the_last_is_full_and_has_no_rope() -> None:
    found = model_of()
    assert found.config.windows == (2048, 0, 2048, 2048, 2048, 0)
    assert found.config.rope_kinds == (1, 0, 1, 1, 1, 0)
    assert "images are not supported" in found.notes[-1]
    assert "model.vision_adapter.*" in found.ignored_tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_rope_theta": [10000.0] * 5 + [500.0]}, "layer_rope_theta is .*; 0 or 10000.0 for each layer"),
        ({"layer_rope_theta": [0]}, "layer_rope_theta is .0.; 0 or 10000.0 for each layer"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; a positive number is expected"),
        ({"hidden_activation": "tanh"}, "'tanh' is not supported"),
        ({"layer_types": ["chunked_attention"] * 6}, "layers may be full or sliding attention"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_of(**changes)
