"""The importance of weights: it is the mean square of their inputs, and lowers the weighted errors of 4-bit packs."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.models import SIZES, TinyModel, make_model
from tests.support.weights.gguf_models import write_gguf
from tests.support.weights.packs import part
from tpi.calibration import forward
from tpi.calibration.floats import weighs_errors
from tpi.calibration.forward import importances
from tpi.calibration.text import calibration_tokens
from tpi.config import Format
from tpi.pack.builder.build import OpenedSource, open_source, pack_model, repair_pack
from tpi.pack.builder.plan import PackPlan, plan_pack
from tpi.pack.builder.writer import Importance
from tpi.pack.groups import dequantise_groups, quantise_groups
from tpi.pack.layout import GROUP
from tpi.pack.reader import Pack

F32 = npt.NDArray[np.float32]
Models: TypeAlias = Callable[[str], TinyModel]
TOKENS = [1, 17, 300, 42, 42, 7, 250, 9, 88, 123, 5, 61, 2, 319, 33, 71]


@pytest.mark.parametrize("format", ["q4", "q4s"])
@pytest.mark.parametrize("shape", [(64, 96), (3, 40, 64)])
def test_weighted_errors_are_never_larger(format: Format, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(shape))
    for spread in (0.1, 1.0, 3.0):
        values = random.standard_t(3, shape).astype(np.float32)
        weights = np.exp(spread * random.normal(size=shape[-1])).astype(np.float32)
        plain, weighted = (
            np.square(values - dequantise_groups(format, quantise_groups(format, values, chosen)))
            .reshape(*shape[:-1], -1, GROUP)
            for chosen in (None, weights)
        )  # fmt: skip
        factors = weights.reshape(-1, GROUP)
        before, after = (plain * factors).sum(axis=-1), (weighted * factors).sum(axis=-1)
        assert (after <= before * np.float32(1 + 1e-5)).all()
        assert after.sum() < (0.999 if spread > 0.5 else 1.0) * before.sum()


@pytest.mark.parametrize("format", ["q4", "q4s"])
def test_extreme_weights_and_values_stay_finite(format: Format) -> None:
    values = np.zeros((4, GROUP), np.float32)
    values[1] = 3.5
    values[2, 5], values[3] = 6e4, np.linspace(-1e-7, 1e-7, GROUP)
    weights = np.full(GROUP, 1e-20, np.float32)
    weights[5] = 1e10
    found = dequantise_groups(format, quantise_groups(format, values, weights))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:2], values[:2], rtol=1e-3)
    np.testing.assert_allclose(found[2, 5], 6e4, rtol=1e-3)


@pytest.mark.parametrize("format", ["q4", "q4s"])
def test_values_on_the_grid_keep_their_codes(format: Format) -> None:
    random = np.random.default_rng(3)
    values = dequantise_groups(format, quantise_groups(format, random.normal(size=(64, 128)).astype(np.float32)))
    weights = np.exp(random.normal(size=128)).astype(np.float32)
    plain, weighted = quantise_groups(format, values), quantise_groups(format, values, weights)
    np.testing.assert_array_equal(weighted, plain)
    np.testing.assert_allclose(dequantise_groups(format, weighted), values, atol=1e-6)


def plan_of(opened: OpenedSource, dtype: str = "q4") -> PackPlan:
    return plan_pack(opened.model, opened.source, dtype)


def measured(opened: OpenedSource) -> list[Importance]:
    return list(importances(opened.model.config, plan_of(opened), opened.source, TOKENS))


def hooked(model: TinyModel, names: tuple[str, ...]) -> dict[str, F32]:
    """Return the mean squares of the inputs of modules of the model in transformers, by the module's name."""
    import torch

    found: dict[str, F32] = {}

    def noted(name: str) -> Callable[..., None]:
        def hook(module: object, given: tuple[Any, ...]) -> None:
            found[name] = given[0].reshape(-1, given[0].shape[-1]).square().mean(0).numpy()

        return hook

    modules = dict(model.reference.named_modules())
    handles = [modules[name].register_forward_pre_hook(noted(name)) for name in names]
    with torch.no_grad():
        model.reference(torch.tensor([TOKENS]))
    for handle in handles:
        handle.remove()
    return found


def test_importance_is_the_mean_square_of_each_input(tiny_model: Models) -> None:
    attention, ffn = measured(open_source(tiny_model("llama").directory))[2:]
    at = "model.layers.1."
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    means = hooked(tiny_model("llama"), tuple(f"{at}{name}" for name in names))
    q, o, gate, down = (means[f"{at}{name}"] / means[f"{at}{name}"].mean() for name in names)
    assert attention.keys() == {("query", 0, "q"), ("query", 0, "o")}  # k and v are stored in q8
    assert ffn.keys() == {("neuron", 0, "gate"), ("neuron", 0, "up"), ("neuron", 0, "down")}
    np.testing.assert_allclose(attention["query", 0, "q"], q, rtol=2e-3)
    np.testing.assert_allclose(attention["query", 0, "o"], o, rtol=2e-3)
    np.testing.assert_allclose(ffn["neuron", 0, "up"], gate, rtol=2e-3)
    np.testing.assert_allclose(ffn["neuron", 0, "down"], down, rtol=2e-3)


def test_an_expert_without_tokens_has_the_importance_of_the_input(tmp_path: Path) -> None:
    """Two tokens use at most six of eight experts. Rows of all experts have an importance, columns only of six."""
    opened = open_source(make_model("qwen3moe", tmp_path).directory)
    (_, experts, *_) = importances(opened.model.config, plan_of(opened), opened.source, TOKENS[:2])
    rows = {piece for _, piece, part in experts if part == "up"}
    columns = {piece for _, piece, part in experts if part == "down"}
    assert rows == set(range(8))
    assert 0 < len(columns) <= 6
    unused = [experts["neuron", piece, "up"] for piece in rows - columns]
    assert all(np.array_equal(unused[0], other) for other in unused)
    used = experts["neuron", min(columns), "up"]
    assert not np.array_equal(used, unused[0])


def test_equal_packs_from_equal_sources_and_when_mended(tiny_model: Models, tmp_path: Path) -> None:
    opened = open_source(tiny_model("qwen35").directory)
    for target in ("first", "second"):
        pack_model(opened, "q4", tmp_path / target)
    first, second = (Pack.open(tmp_path / target) for target in ("first", "second"))
    assert first.manifest.to_json() == second.manifest.to_json()
    damaged = [first.layers[1][0].id, first.embedding.id]
    for name in damaged:
        (first.path / f"{name}.safetensors").unlink()
    assert repair_pack(opened, "q4", first.path, first.manifest, damaged, False)
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == {
        file.name: file.read_bytes() for file in second.path.iterdir()
    }


def test_importance_changes_the_codes_of_floats_alone(tiny_model: Models, tmp_path: Path) -> None:
    """Without the text, only codes of floats differ. Matrices in q8, tables and vectors are the same."""
    opened = open_source(tiny_model("llama").directory)
    pack_model(opened, "q4", tmp_path / "weighted")
    pack_model(replace(opened, tokenizer=lambda out: {}), "q4", tmp_path / "plain")
    weighted, plain = (Pack.open(tmp_path / name) for name in ("weighted", "plain"))
    for one, other in zip(weighted.walk(), plain.walk(), strict=True):
        assert one.id != other.id
        assert one.shape == other.shape
    first, second = (part(pack.layers[0][0], "kv", "k") for pack in (weighted, plain))
    np.testing.assert_array_equal(first, second)
    assert weighted.embedding.id == plain.embedding.id


@pytest.mark.parametrize(("kind", "dtype", "parts"), [("Q8_0", "q4", 5), ("Q4_1", "q4", 0), ("Q4_0", "q4s", 0)])
def test_codes_of_another_format_are_weighed(
    kind: str, dtype: str, parts: int, tiny_model: Models, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", lambda name: kind)
    opened = open_source(tmp_path / "m.gguf")
    plan = plan_of(opened, dtype)
    found = list(importances(opened.model.config, plan, opened.source, TOKENS))
    assert [len(attention) + len(ffn) for attention, ffn in zip(found[::2], found[1::2], strict=True)] == [parts] * 2
    assert weighs_errors(plan, opened.source) == bool(parts)
    opened.source.close()


def test_a_model_without_a_tokenizer_is_fitted_plainly_and_says_so(
    tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = replace(open_source(tiny_model("llama").directory), tokenizer=lambda out: {})
    pack_model(opened, "q4", tmp_path / "q4")
    pack_model(opened, "q8", tmp_path / "q8")
    said = [line for line in capsys.readouterr().err.splitlines() if "no tokenizer" in line]
    assert said == [f"tpi: {opened.name}: no tokenizer, so all errors of its weights count alike in 4 bits"]


def test_the_text_has_512_tokens_and_fits_the_model(tiny_model: Models) -> None:
    tokenizer = tiny_model("llama").directory / "tokenizer.json"
    assert len(calibration_tokens(tokenizer, 320, 4096)) == 512
    short = calibration_tokens(tokenizer, 100, 64)
    assert len(short) == 64
    assert max(short) < 100


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedSource]:
    """A model with a feed-forward block of 5.9 MB in f32, far more than its attention block."""
    monkeypatch.setitem(SIZES, "intermediate_size", 5120)
    opened = open_source(make_model("llama", tmp_path).directory)
    yield opened
    opened.source.close()


def test_a_wide_block_is_computed_in_segments(wide: OpenedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "SEGMENT_BYTES", 1 << 30)
    whole = measured(wide)
    monkeypatch.setattr(forward, "SEGMENT_BYTES", 200_000)
    tracemalloc.start()
    try:
        parts = measured(wide)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-3)
