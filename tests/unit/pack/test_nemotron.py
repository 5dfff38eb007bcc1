"""Nemotron-H: blocks that its files number, from directories and GGUF files, and the settings that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import NEMOTRON, NEMOTRONS, TOKENS, TinyModel, forward, reference_logits
from tests.support.weights.gguf_models import byte_level_vocabulary
from tests.support.weights.gguf_nemotron import write_gguf
from tpi.errors import ModelError
from tpi.families.base import Model
from tpi.families.huggingface.reader import from_huggingface
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Models = Callable[[str], TinyModel]
FIELDS: dict[str, Any] = NEMOTRON | {"architectures": ["NemotronHForCausalLM"], "n_groups": 3}


def model_of(**changes: Any) -> Model:
    return from_huggingface(FIELDS | changes, lambda name: True, "somewhere")


def logits(source: Path, target: Path, dtype: str = "f32") -> np.ndarray:
    pack_model(open_source(source), dtype, target)
    return np.asarray(forward(Pack.open(target), TOKENS))


def without_limit(directory: Path, target: Path) -> Path:
    """Return a copy of a model whose step sizes have no limit, as in GGUF files."""
    shutil.copytree(directory, target)
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"time_step_min": 0.0}))
    return target


@pytest.mark.parametrize("family", NEMOTRONS)
def test_a_gguf_file_gives_the_logits_of_the_directory(family: str, tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(tmp_path / "m.gguf", model, vocabulary=byte_level_vocabulary(model.directory))
    found = logits(tmp_path / "m.gguf", tmp_path / "a")
    np.testing.assert_allclose(found, logits(without_limit(model.directory, tmp_path / "d"), tmp_path / "b"), atol=1e-5)
    limited = np.abs(found - reference_logits(model, TOKENS)).max() > 1e-2
    assert limited == (model.reference.config.time_step_min > 0.1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", NEMOTRONS)
def test_quantised_blocks_keep_their_values(kind: str, family: str, tiny_model: Models, tmp_path: Path) -> None:
    """With `auto`, codes are kept; the same file packed in f32 has the same values.

    A near tie of experts may be decided differently, so a few tokens may differ.
    """
    model = tiny_model(family)
    kinds = {True: "F32", False: kind}  # rows of 172 values cannot be quantised
    write_gguf(tmp_path / "m.gguf", model, lambda name: kinds["down" in name], byte_level_vocabulary(model.directory))
    exact, kept = (logits(tmp_path / "m.gguf", tmp_path / dtype, dtype) for dtype in ("f32", "auto"))
    assert np.median(np.abs(kept - exact).max(axis=1)) < 0.05 * np.ptp(exact)


def test_a_pattern_of_letters_means_the_same_as_names() -> None:
    """The beginning of Nemotron 3 Nano: a layer of TPI begins with each Mamba2 or attention block."""
    letters = model_of(hybrid_override_pattern="MEMEM*E-")
    kinds = [[block.kind for block in layer] for layer in letters.layers]
    assert kinds == [["mamba", "experts"], ["mamba", "experts"], ["mamba"], ["attention", "experts", "ffn"]]
    names = ["mamba", "moe", "mamba", "moe", "linear_attention", "attention", "moe", "mlp"]
    assert model_of(layers_block_type=names).layers == model_of(layer_types=names).layers == letters.layers
    assert letters.layers[3][1].vectors[0][1].tensor == "backbone.layers.6.norm.weight"


@pytest.mark.parametrize("family", NEMOTRONS)
def test_neurons_are_stored_in_tiles(family: str, tiny_model: Models, tmp_path: Path) -> None:
    """Activations are often 0, but no mode computes only some neurons of such a model."""
    pack_model(open_source(tiny_model(family).directory), "q8", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert {run.layout for block in pack.walk() for run in block.shape.runs} == {"tiled"}
    native, plain = (forward(pack, TOKENS, open_kernels(name)) for name in ("native", "reference"))
    assert np.abs(native - plain).max() < 2e-3 * np.ptp(plain)


def test_tensors_for_further_tokens_may_go_unused() -> None:
    assert "mtp.*" in model_of(num_nextn_predict_layers=1).ignored_tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_latent_size": 32}, "moe_latent_size is '32'; None is supported"),
        ({"use_bias": True}, "use_bias is 'True'"),
        ({"sliding_window": 8}, "sliding_window is '8'; None is supported"),
        ({"mlp_bias": True}, "mlp_bias is true: experts with biases"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; 'silu' is supported"),
        ({"hybrid_override_pattern": "EM*"}, "its first block is neither Mamba2 nor attention"),
        ({"hybrid_override_pattern": "MEX*"}, "the kinds of its blocks are 'MEX.'; supported are M, ., -, E"),
        ({"layers_block_type": ["mamba", "sliding_attention"]}, "supported are mamba, linear_attention, attention"),
        ({"hybrid_override_pattern": "MEM"}, "no layer has attention"),
        ({"n_groups": 4}, "6 value heads are not a multiple of 4 key heads"),
        ({"num_local_experts": 4, "n_routed_experts": 8}, "n_routed_experts is 8, but num_local_experts"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_of(**changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nemotron_h_moe.moe_latent_size", 32, "settings that are not supported: nemotron_h_moe.moe_latent_size"),
        ("nemotron_h_moe.feed_forward_length", [0, 100, 0, 0], "a whole number for each of 5 blocks is expected"),
        ("nemotron_h_moe.feed_forward_length", [0, 100, 0, 0, 64], "one number for all blocks of a kind is expected"),
    ],
)
def test_unsupported_metadata_is_named(
    key: str, value: object, message: str, tiny_model: Models, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("nemotronhmoe"), changes={key: value})
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path / "m.gguf")
