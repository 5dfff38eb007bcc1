"""Thresholds for activations that are small but not 0: calibrated to an error that holds; the pack made for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.kernel_cases import ffn_case
from tests.support.models import TinyModel, forward
from tests.support.weights.packs import part
from tpi.block import ffn_spec
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.partition import Range
from tpi.sparsity.gated import GatedBlock
from tpi.sparsity.replay import FfnWeights, chunks, dense, logits, perplexity, read_ffn, replay
from tpi.sparsity.thresholds import (
    NAME,
    calibrate,
    importance,
    load_thresholds,
    masked,
    save_thresholds,
    threshold_of,
)

Tiny = Callable[[str], TinyModel]
TEXT = np.random.default_rng(3).integers(3, 320, (3, 24)).astype(np.int32)


def weights_of(seed: int, gated: bool = True) -> FfnWeights:
    case = ffn_case(np.random.default_rng(seed), gated=gated, hidden=32, units=2)
    random = np.random.default_rng(seed)
    made = [random.standard_normal((64, 32)).astype(np.float32) for _ in range(3)]
    return FfnWeights(case.spec, made[0] if gated else None, made[1], made[2])


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "qwen3"])
def test_a_replay_is_the_model(name: str, tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack(name), open_kernels()
    found = logits(pack, replay(pack, TEXT, kernels), kernels)
    expected = np.concatenate([forward(pack, sequence.tolist()) for sequence in TEXT])
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_perplexity_is_that_of_the_logits(tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("llama")
    surprise = []
    for sequence in TEXT:
        found = forward(pack, sequence.tolist()).astype(np.float64)[:-1]
        log_sum = np.log(np.exp(found).sum(axis=1))
        surprise += (log_sum - found[np.arange(len(found)), sequence[1:]]).tolist()
    assert perplexity(pack, TEXT, open_kernels()) == pytest.approx(np.exp(np.mean(surprise)), rel=1e-4)


@given(seed=st.integers(0, 200), error=st.floats(0, 0.9), gated=st.booleans())
@settings(max_examples=40)
def test_a_threshold_holds_its_error_and_a_higher_one_would_skip_more(seed: int, error: float, gated: bool) -> None:
    weights = weights_of(seed, gated)
    x = np.random.default_rng(seed + 1).standard_normal((40, 32)).astype(np.float32)
    found = threshold_of(weights, x, error)
    left_out = importance(weights, x) < np.float32(found.threshold)
    whole, some = dense(0, weights, x), masked(weights, x, ~left_out)
    measured = np.sqrt(np.mean((np.linalg.norm(whole - some, axis=1) / np.linalg.norm(whole, axis=1)) ** 2))
    assert measured <= error + 1e-5
    assert found.error == pytest.approx(measured, abs=1e-5)
    assert found.skipped == pytest.approx(left_out.mean())
    assert threshold_of(weights, x, min(error + 0.05, 0.95)).skipped >= found.skipped


def test_one_large_token_does_not_hide_what_others_lose() -> None:
    weights = weights_of(5)
    x = np.random.default_rng(6).standard_normal((40, 32)).astype(np.float32)
    x[0] *= 300
    found = threshold_of(weights, x, 0.1)
    whole, some = dense(0, weights, x), masked(weights, x, importance(weights, x) >= np.float32(found.threshold))
    lost = np.linalg.norm(whole - some, axis=1) / np.linalg.norm(whole, axis=1)
    assert np.sqrt(np.mean(lost[1:] ** 2)) < 0.11


def test_no_error_skips_nothing_that_counts(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("llama"), open_kernels()
    thresholds = calibrate(pack, TEXT, kernels, 0.0)
    assert [layer.error for layer in thresholds.layers] == [0.0, 0.0]
    np.testing.assert_allclose(
        replay(pack, TEXT, kernels, thresholds.feed_forward), replay(pack, TEXT, kernels), rtol=1e-5, atol=1e-5
    )


def test_more_error_skips_more_and_is_worse(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("llama"), open_kernels()
    expected, shares, errors = replay(pack, TEXT, kernels), [], []
    for error in (0.05, 0.2, 0.5):
        thresholds = calibrate(pack, TEXT, kernels, error)
        found = replay(pack, TEXT, kernels, thresholds.feed_forward)
        shares.append(thresholds.skipped)
        errors.append(np.linalg.norm(found - expected))
        assert all(layer.error <= error for layer in thresholds.layers)
    assert shares == sorted(shares)
    assert errors == sorted(errors)
    assert 0 < shares[0] < shares[-1] < 1


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_a_pack_with_the_gate_apart_computes_what_the_plain_one_does(
    dtype: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    source = tiny_model("llama3").directory
    for name in ("plain", "apart"):
        pack_model(open_source(source), dtype, tmp_path / name, gate_first=name == "apart")
    plain, apart = Pack.open(tmp_path / "plain"), Pack.open(tmp_path / "apart")
    block = apart.layers[0][1]
    layouts = {run.name: (run.layout, [item.name for item in run.parts]) for run in block.shape.runs}
    assert layouts == {
        "gate": ("record" if dtype == "f32" else "tiled", ["gate"]),
        "neuron": ("record", ["up", "down"]),
    }
    np.testing.assert_array_equal(part(block, "gate", "gate"), part(plain.layers[0][1], "neuron", "gate"))
    for name in ("up", "down") if dtype == "f32" else ("up",):
        np.testing.assert_array_equal(part(block, "neuron", name), part(plain.layers[0][1], "neuron", name))
    apart.verify()
    assert apart.weight_bytes - plain.weight_bytes < 2 * 8192  # headers and hashes of the further runs


def gated_block(pack: Pack, layer: int) -> tuple[GatedBlock, FfnWeights]:
    block = pack.layers[layer][1]
    gate, neuron = block.run("gate"), block.run("neuron")
    weights = read_ffn(pack.config, block, open_kernels())
    norms = np.pad(weights.down_norms, (0, neuron.units * neuron.width - len(weights.down_norms)))
    data = [block.read_units(run.name, 0, run.units).reshape(-1) for run in (gate, neuron)]
    spec = ffn_spec(pack.config, neuron, block.vectors(), Range(0, neuron.units))
    return GatedBlock(spec, gate, data[0], data[1], norms), weights


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_gate_first_is_the_thresholds_feed_forward(dtype: str, tiny_model: Tiny, tmp_path: Path) -> None:
    pack_model(open_source(tiny_model("llama3").directory), dtype, tmp_path / "pack", gate_first=True)
    pack, kernels = Pack.open(tmp_path / "pack"), open_kernels()
    block, weights = gated_block(pack, 1)
    x = np.random.default_rng(8).standard_normal((5, pack.config.hidden)).astype(np.float32)
    normed = kernels.norm(block.spec.norm, x)
    threshold = threshold_of(weights, normed, 0.3).threshold
    active = block.called_for(x, threshold)
    assert 0 < active.mean() < 0.95
    found = block.compute(x, active)
    expected = masked(weights, normed, active[:, : weights.up.shape[0]])
    assert np.abs(found - expected).max() < (1e-4 if dtype == "f32" else 2e-2) * np.abs(expected).max()
    agreed = active[:, : weights.up.shape[0]] == (importance(weights, normed) >= np.float32(threshold))
    assert agreed.mean() > (0.999 if dtype == "f32" else 0.98)


def test_without_a_gate_nothing_can_be_computed_first(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no gate"):
        pack_model(open_source(tiny_model("opt").directory), "f32", tmp_path / "pack", gate_first=True)


def test_thresholds_are_kept_beside_the_pack(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    thresholds = calibrate(tiny_pack("llama"), TEXT, open_kernels(), 0.2)
    save_thresholds(tmp_path / NAME, thresholds)
    assert load_thresholds(tmp_path / NAME, 2) == thresholds
    for layers, content in (
        (3, None),
        (2, b"{}"),
        (2, b'{"version": 1, "error": 0.1, "tokens": 1, "layers": [{}, {}]}'),
    ):
        if content is not None:
            (tmp_path / NAME).write_bytes(content)
        with pytest.raises(ModelError, match=NAME):
            load_thresholds(tmp_path / NAME, layers)


@pytest.mark.parametrize("error", [-0.1, 1.0, float("nan")])
def test_an_error_that_is_no_share_is_refused(error: float) -> None:
    with pytest.raises(ModelError, match="not possible"):
        threshold_of(weights_of(0), np.zeros((1, 32), np.float32), error)


def test_a_text_is_cut_into_whole_pieces() -> None:
    ids: Any = list(range(25))
    np.testing.assert_array_equal(chunks(ids, 10), np.arange(20).reshape(2, 10))
    assert chunks(ids, 10, most=1).shape == (1, 10)
    with pytest.raises(ModelError, match="at least 30"):
        chunks(ids, 30)
