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
from tests.support.perplexity import logits, perplexity
from tests.support.weights.packs import part
from tests.support.weights.trained import write_trained
from tpi.block import ffn_spec
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.kernels.reference import ReferenceKernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.partition import Range
from tpi.sparsity.gates import GateCurve, check_error, curve_of, load_curves, measure_curves, save_curves
from tpi.sparsity.replay import FfnWeights, chunks, dense, read_ffn, replay
from tpi.sparsity.thresholds import NAME, importance, masked

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
    found = curve_of(weights, x).at(error)
    left_out = importance(weights, x) < np.float32(found.threshold)
    whole, some = dense(0, weights, x), masked(weights, x, ~left_out)
    measured = np.sqrt(np.mean((np.linalg.norm(whole - some, axis=1) / np.linalg.norm(whole, axis=1)) ** 2))
    assert measured <= error + 1e-5
    assert found.error == pytest.approx(measured, abs=1e-5)
    assert found.skipped == pytest.approx(left_out.mean())
    assert curve_of(weights, x).at(min(error + 0.05, 0.95)).skipped >= found.skipped


def test_one_large_token_does_not_hide_what_others_lose() -> None:
    weights = weights_of(5)
    x = np.random.default_rng(6).standard_normal((40, 32)).astype(np.float32)
    x[0] *= 300
    found = curve_of(weights, x).at(0.1)
    whole, some = dense(0, weights, x), masked(weights, x, importance(weights, x) >= np.float32(found.threshold))
    lost = np.linalg.norm(whole - some, axis=1) / np.linalg.norm(whole, axis=1)
    assert np.sqrt(np.mean(lost[1:] ** 2)) < 0.11


def test_no_error_skips_nothing_that_counts(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("llama"), open_kernels()
    thresholds = measure_curves(pack, TEXT, kernels, error=0.0).at(0.0)
    assert [layer.error for layer in thresholds.layers] == [0.0, 0.0]
    np.testing.assert_allclose(
        replay(pack, TEXT, kernels, thresholds.feed_forward), replay(pack, TEXT, kernels), rtol=1e-5, atol=1e-5
    )


def test_more_error_skips_more_and_is_worse(tiny_pack: Callable[..., Pack]) -> None:
    pack, kernels = tiny_pack("llama"), open_kernels()
    expected, shares, errors = replay(pack, TEXT, kernels), [], []
    curves = measure_curves(pack, TEXT, kernels)
    for error in (0.05, 0.2, 0.5):
        thresholds = curves.at(error)
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


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_gate_first_is_the_thresholds_feed_forward(dtype: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """The kernels leave out what the thresholds do, from the least activations that are made of them."""
    pack_model(open_source(tiny_model("llama3").directory), dtype, tmp_path / "pack", gate_first=True)
    pack, kernels = Pack.open(tmp_path / "pack"), ReferenceKernels()
    block = pack.layers[1][1]
    gate, neuron, weights = block.run("gate"), block.run("neuron"), read_ffn(pack.config, block, kernels)
    spec = ffn_spec(pack.config, neuron, block.vectors(), Range(0, neuron.units), gate)
    data = np.concatenate([block.read_units(run.name, 0, run.units).reshape(-1) for run in (gate, neuron)])
    x = np.random.default_rng(8).standard_normal((1, pack.config.hidden)).astype(np.float32)
    normed = kernels.norm(spec.norm, x)
    others = np.random.default_rng(9).standard_normal((40, len(x[0])), np.float32)
    curve = curve_of(weights, kernels.norm(spec.norm, others))
    active = importance(weights, normed) >= np.float32(curve.at(0.3).threshold)
    assert 0 < active.mean() < 0.95
    padding = neuron.units * neuron.width - active.size
    found, count = kernels.ffn_gated(spec, data, x, np.pad(curve.least(0.3), (0, padding), constant_values=np.inf))
    expected = masked(weights, normed, active)
    assert abs(count - active.sum()) <= (0 if dtype == "f32" else 0.02 * active.size)
    assert np.abs(found - expected).max() < (1e-4 if dtype == "f32" else 3e-2) * np.abs(expected).max()


def test_without_a_gate_nothing_can_be_computed_first(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="needs a gated feed-forward network"):
        pack_model(open_source(tiny_model("opt").directory), "f32", tmp_path / "pack", gate_first=True)


def test_neurons_that_are_already_0_are_not_packed_gate_first(tiny_model: Tiny, tmp_path: Path) -> None:
    write_trained(tmp_path / "model")
    with pytest.raises(ModelError, match="whose activation is not sparse"):
        pack_model(open_source(tmp_path / "model"), "f32", tmp_path / "pack", gate_first=True)


def test_curves_are_kept_beside_the_pack(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    curves, shape = measure_curves(pack, TEXT, open_kernels(), "this"), (2, pack.config.intermediate)
    assert load_curves(tmp_path / NAME, *shape) is None
    save_curves(tmp_path / NAME, curves)
    kept = load_curves(tmp_path / NAME, *shape)
    assert kept is not None
    assert (kept.of, kept.tokens) == ("this", TEXT.size)
    assert [kept.at(error) for error in (0.01, 0.3)] == [curves.at(error) for error in (0.01, 0.3)]
    np.testing.assert_array_equal(kept.layers[1].least(0.2), curves.layers[1].least(0.2))
    with pytest.raises(ModelError, match="another model"):
        load_curves(tmp_path / NAME, 3, shape[1])
    whole = (tmp_path / NAME).read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"PK" + whole[5:]):
        (tmp_path / NAME).write_bytes(damaged)
        with pytest.raises(ModelError, match=f"{NAME} cannot be used"):
            load_curves(tmp_path / NAME, *shape)


def test_the_least_activation_is_the_threshold_over_the_length_of_down() -> None:
    thresholds, skipped, errors = (np.asarray(each, np.float32) for each in ([0, 2, 4], [0, 0.3, 0.6], [0, 0.1, 0.4]))
    curve = GateCurve(thresholds, skipped, errors, np.asarray([0.5, 2, 0, 1e-38], np.float32))
    assert curve.at(0.2).threshold == 2
    assert curve.at(0.05).threshold == 0
    assert curve.at(0.9).threshold == 4
    least = curve.least(0.2)
    assert least[:2].tolist() == [4, 1]
    assert np.isfinite(least).all()
    assert (least[2:] > 1e38).all()  # what reaches no output is never computed


@pytest.mark.parametrize("error", [-0.1, 1.0, float("nan")])
def test_an_error_that_is_no_share_is_refused(error: float) -> None:
    with pytest.raises(ModelError, match="not possible"):
        check_error(error)


def test_a_text_is_cut_into_whole_pieces() -> None:
    ids: Any = list(range(25))
    np.testing.assert_array_equal(chunks(ids, 10), np.arange(20).reshape(2, 10))
    assert chunks(ids, 10, most=1).shape == (1, 10)
    with pytest.raises(ModelError, match="at least 30"):
        chunks(ids, 30)
