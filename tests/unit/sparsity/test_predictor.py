"""Predictors of active neurons: their results, their sizes, and files that are read exactly or refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.sparsity.files import NAME, load_predictors, save_predictors
from tpi.sparsity.predictor import Predictor, PredictorMatrix, Weights

HIDDEN, NEURONS = 64, 96


def made(rank: int, weights: Weights, layer: int = 3, bias: bool = True, seed: int = 0) -> Predictor:
    random = np.random.default_rng(seed)
    first = random.standard_normal((rank, HIDDEN)).astype(np.float32)
    second = random.standard_normal((NEURONS, rank)).astype(np.float32)
    return Predictor(
        layer, PredictorMatrix.of(first, weights), PredictorMatrix.of(second, weights), 0.5, 2, "normed",
        random.standard_normal(NEURONS).astype(np.float32) if bias else None,
    )  # fmt: skip


def inputs(tokens: int, seed: int = 1) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((tokens, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize(("weights", "error"), [("f16", 1e-3), ("q8", 1e-3), ("q4s", 2e-2)])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_scores_are_the_formula_on_any_kernels(weights: Weights, error: float, tokens: int) -> None:
    predictor, x = made(32, weights), inputs(tokens)
    assert predictor.bias is not None
    plain = np.maximum(x @ predictor.first.values().T, 0) @ predictor.second.values().T + predictor.bias
    for kernels in (None, open_kernels("native"), open_kernels("reference")):
        found = predictor.scores(x, kernels)
        assert np.abs(found - plain).max() < error * np.abs(plain).max()
    np.testing.assert_array_equal(predictor.active(x), predictor.scores(x) >= 0.5)


def test_sizes_are_those_of_the_file_and_of_memory(tmp_path: Path) -> None:
    small, large = made(32, "q8", bias=False), made(32, "f16", bias=False)
    assert made(32, "q4s", bias=False).nbytes == (HIDDEN + NEURONS) * 18
    assert small.nbytes == (HIDDEN + NEURONS) * 34
    assert large.nbytes == 2 * 32 * (HIDDEN + NEURONS)
    assert small.memory_bytes == sum(matrix.data.nbytes for matrix in (small.first, small.second))
    save_predictors(tmp_path / NAME, [small])
    assert 0 < (tmp_path / NAME).stat().st_size - small.nbytes < 1000


@given(
    groups=st.integers(1, 3),
    odd=st.integers(0, 3),
    weights=st.sampled_from(["f16", "q8", "q4s"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_a_file_gives_back_what_was_saved(
    groups: int, odd: int, weights: Weights, bias: bool, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("predictors") / NAME
    rank = 32 * groups + (odd if weights == "f16" else 0)
    saved = [made(rank, weights, layer, bias, seed + layer) for layer in (2, 5)]
    save_predictors(path, saved, "trained")
    found = load_predictors(path)
    assert list(found) == [2, 5]
    for before in saved:
        after = found[before.layer]
        np.testing.assert_array_equal(after.first.stored, before.first.stored)
        assert (after.first.weights, after.second.weights) == (weights, weights)
        np.testing.assert_array_equal(after.scores(inputs(2)), before.scores(inputs(2)))
        assert (after.threshold, after.ahead, after.input_kind) == (before.threshold, before.ahead, before.input_kind)
        assert (after.bias is None) == (before.bias is None)


def test_no_file_is_no_predictors(tmp_path: Path) -> None:
    assert load_predictors(tmp_path / NAME) == {}


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_file_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / NAME
    save_predictors(path, [made(32, "q8")])
    content = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, length - 1))
    content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, length, 3]))]))
    refusal = ""
    try:
        assert all(one.first.columns * one.rank for one in load_predictors(path).values())
    except ModelError as error:
        refusal = str(error)
    assert not refusal or str(path) in refusal


@pytest.mark.parametrize(
    ("rank", "columns", "words"), [(32, 31, "rank 32 and 31"), (20, 20, "not a multiple of 32"), (32, 32, "finite")]
)
def test_matrices_that_do_not_fit_are_refused(rank: int, columns: int, words: str) -> None:
    first = np.zeros((rank, HIDDEN), np.float32)
    second = np.zeros((NEURONS, columns), np.float32)
    if words == "finite":
        first[0, 0] = np.inf
    weights: Weights = "q8" if columns == 20 else "f16"
    with pytest.raises(ModelError, match=words):
        Predictor(0, PredictorMatrix.of(first, weights), PredictorMatrix.of(second, weights))


def test_nothing_is_predicted_before_the_first_layer() -> None:
    one = made(32, "q8")
    with pytest.raises(ModelError, match="look-ahead 2"):
        Predictor(1, one.first, one.second, ahead=2)
