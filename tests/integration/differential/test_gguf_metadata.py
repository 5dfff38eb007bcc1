"""Random GGUF metadata: TPI gives the logits that it means, or refuses. No key that changes answers is ignored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.differential import gguf_expert_draws
from tests.support.differential.gguf_differential import run
from tests.support.differential.gguf_draws import KEYS, NAMES, Draw, weights
from tpi.errors import ModelError
from tpi.families.table import FAMILIES
from tpi.pack.builder.build import open_source

DRAWS = 900
FURTHER = (
    *(f"{name}.bias" for name in ("attn_q", "attn_output", "attn_qkv", "ffn_gate", "ffn_up", "ffn_down")),
    "output.weight", "rope_freqs.weight", "rope_factors_short.weight",
)  # fmt: skip


def test_every_architecture_is_drawn() -> None:
    """Falcon, Bamboo and OPT are left out: only PowerInfer's files have them, without such metadata.

    Families with recurrent layers, Gemma 4, Muse Glimmer and EXAONE are tested in tests/unit/pack (test_delta.py,
    test_conv.py, test_mamba.py, test_nemotron.py, test_gemma4.py, test_muse.py and test_exaone.py). Their reference is
    transformers.
    """
    architectures = {gguf_expert_draws.ARCHITECTURES.get(name, name) for name in NAMES}
    own = {"falcon", "bamboo", "opt", "qwen35", "qwen35moe", "qwen3next", "gemma4", "lfm2", "lfm2moe", "granitehybrid"}
    own |= {"nemotron_h", "nemotron_h_moe", "muse-glimmer", "exaone-moe"}
    assert architectures | own == {family.gguf for family in FAMILIES if family.gguf}


def test_random_metadata(tmp_path: Path) -> None:
    tally = run(range(DRAWS), tmp_path)
    assert not tally.wrong
    assert tally.ran.total() >= DRAWS // 2
    assert all(tally.ran[name] >= 10 for name in NAMES), tally.ran
    rare = {key: tally.varied[key] for key in KEYS if tally.varied[key] < 10}
    assert not rare
    further = (*FURTHER, *gguf_expert_draws.OWN_KEYS, *gguf_expert_draws.TENSORS)
    assert all(tally.varied[name] >= 5 for name in further), {name: tally.varied[name] for name in further}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention.output_scale": 0.5}, ["llama.attention.output_scale", "refused"]),
        ({"logit_scale": 0.5}, ["llama.logit_scale"]),
        ({"attention.causal": False}, ["llama.attention.causal"]),
        ({"attn_logit_softcapping": 2.0}, ["llama.attn_logit_softcapping"]),
        ({"rope.scaling.type": "magic"}, ["magic", "none, linear, yarn, longrope"]),
        ({"rope.scaling.factor": -1.0}, ["rope.scaling.factor", "-1.0"]),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.5}, ["rope.scaling.yarn_attn_factor", "1.5"]),
        ({"rope.dimension_count": 4}, ["4", "16"]),
        ({"attention.value_length": 8}, ["keys and values"]),
        ({f"new_{number}": 1 for number in range(9)}, ["llama.new_0, llama.new_1, llama.new_2 and 6 more"]),
    ],
)
def test_what_is_not_supported_is_named(keys: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    plain(keys).write(tmp_path / "m.gguf")
    with pytest.raises(ModelError) as caught:
        open_source(tmp_path / "m.gguf")
    assert all(word in str(caught.value) for word in [str(tmp_path / "m.gguf"), *words])


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    found = []
    for keys in (
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 2.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    ):
        plain(keys).write(tmp_path / "m.gguf")
        found.append(np.array(open_source(tmp_path / "m.gguf").model.config.inv_freq))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_allclose(found[0] * 4, found[3])


def test_a_factor_of_yarn_that_all_programs_agree_on_is_taken(tmp_path: Path) -> None:
    """Files of OLMo 3 contain the factor that YaRN has by default."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
    plain(yarn | {"rope.scaling.yarn_attn_factor": 1.2079441541679836}, "olmo2").write(tmp_path / "m.gguf")
    assert open_source(tmp_path / "m.gguf").model.config.rope_scale == pytest.approx(1.2079441541679836)


def plain(keys: dict[str, Any], architecture: str = "llama") -> Draw:
    """Return a small model with `further` metadata."""
    sizes: dict[str, Any] = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 24,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    tensors = weights(np.random.default_rng(1), architecture, sizes)
    return Draw(architecture, sizes | keys, tensors, dict.fromkeys(tensors, "F32"))


def test_long_factors_hold_beyond_the_original_context(tmp_path: Path) -> None:
    short, long = np.array([1, 1, 2, 2, 3, 3, 4, 4], np.float32), np.arange(8, 16, dtype=np.float32)
    case = plain({"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}, "phi3")
    case.tensors.update({"rope_factors_short.weight": short, "rope_factors_long.weight": long})
    case.kinds.update({"rope_factors_short.weight": "F32", "rope_factors_long.weight": "F32"})
    case.write(tmp_path / "m.gguf")
    config = open_source(tmp_path / "m.gguf").model.config
    base = 10000.0 ** -(np.arange(8) / 8)
    np.testing.assert_allclose(config.for_context(32).inv_freq, base / short, rtol=1e-6)
    np.testing.assert_allclose(config.for_context(33).inv_freq, base / long, rtol=1e-6)
    assert (config.context, config.rope_scale) == (64, 1.25)
