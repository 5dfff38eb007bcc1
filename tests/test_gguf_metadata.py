"""Any GGUF metadata gives the logits that it means, or a refusal: nothing that changes answers goes unread."""

import os
from collections import Counter
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest

from tests.gguf_draws import ARCHITECTURES, KEYS, Draw, draw, weights
from tests.gguf_reference import Reference
from tests.models import forward
from tpi.errors import ModelError
from tpi.pack.build import open_source, pack_model
from tpi.pack.reader import Pack

DRAWS = 500
FURTHER = (
    *(f"{name}.bias" for name in ("attn_q", "attn_output", "attn_qkv", "ffn_gate", "ffn_up", "ffn_down")),
    "output.weight", "rope_freqs.weight", "rope_factors_short.weight",
)  # fmt: skip
TOKENS = [1, 17, 30, 4, 4, 7, 25, 9, 38, 12, 5, 21, 2, 31, 33, 39]


def differs(case: Draw, directory: Path) -> bool | None:
    """Whether the pack's logits differ from the reference's; None if the file is refused."""
    path, target = directory / "m.gguf", directory / "pack"
    case.write(path)
    try:
        pack_model(open_source(path), "f32", target)
    except ModelError:
        return None
    logits = forward(Pack.open(target), TOKENS)
    rmtree(target)
    expected = Reference(case.architecture, case.keys, case.values).logits(TOKENS)
    return not bool(np.abs(logits - expected).max() < 1e-3 * max(1.0, float(np.abs(expected).max())))


def test_random_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of packs that need not survive a power cut
    random = np.random.default_rng(22)
    ran: Counter[str] = Counter()
    present: Counter[str] = Counter()
    wrong = []
    for number in range(DRAWS):
        case = draw(random)
        different = differs(case, tmp_path)
        if different:
            wrong.append((number, case.architecture, case.keys, [name for name in case.tensors if "bias" in name]))
        if different is not None:
            ran[case.architecture] += 1
            present.update(list(case.keys))
            present.update({name.split(".", 2)[2] if name.startswith("blk.") else name for name in case.tensors})
    assert not wrong, f"{len(wrong)} of {DRAWS} differ, the first: {wrong[0]}"
    assert ran.total() >= DRAWS // 2
    assert all(ran[name] >= 20 for name in ARCHITECTURES), ran
    assert all(present[key] >= 20 for key in KEYS), {key: present[key] for key in KEYS if present[key] < 20}
    assert all(present[name] >= 10 for name in FURTHER), {name: present[name] for name in FURTHER}


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


def plain(keys: dict[str, Any], architecture: str = "llama") -> Draw:
    """A small model with further metadata."""
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
