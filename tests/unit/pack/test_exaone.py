"""EXAONE with experts: its GGUF files, layers without experts, and the settings that are refused."""

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


def model_of(architecture: str = "ExaoneMoeForCausalLM", **changes: Any) -> Model:
    fields = SIZES | {"architectures": [architecture], "num_hidden_layers": 4} | changes
    return from_huggingface(fields, lambda name: "lm_head" not in name and ".gate.e_score" not in name, "somewhere")


def test_a_gguf_file_gives_the_logits_of_the_model(tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("exaonemoe")
    write_gguf(tmp_path / "m.gguf", model, "exaone-moe", vocabulary=byte_level_vocabulary(model.directory))
    pack_model(open_source(tmp_path / "m.gguf"), "f32", tmp_path / "pack")
    found = forward(Pack.open(tmp_path / "pack"), TOKENS)
    np.testing.assert_allclose(found, reference_logits(model, TOKENS), atol=1e-4)


@pytest.mark.parametrize("architecture", ["ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"])
def test_the_kinds_of_layers_of_the_published_model(architecture: str) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    found = model_of(architecture, sliding_window=128, sliding_window_pattern="LLLG", layer_types=kinds)
    assert (found.config.windows, found.config.rope_kinds) == ((128, 128, 128, 0), (1, 1, 1, 0))
    assert [layer[1].kind for layer in found.layers] == ["ffn", "experts", "experts", "experts"]
    assert dict(found.layers[1][1].vectors)["router.choice"].tensor == "model.layers.1.mlp.e_score_correction_bias"
    assert "mtp.*" in found.ignored_tensors


def test_a_list_says_which_layers_have_experts() -> None:
    found = model_of(mlp_layer_types=["sparse", "dense", "sparse", "dense"])
    assert [layer[1].kind for layer in found.layers] == ["experts", "ffn", "experts", "ffn"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; 'noaux_tc' is supported"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types is .*; dense or sparse for each of 4 layers"),
        ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_of(**changes)
