"""Renumbering: a permutation, fair to nodes, hot first; and the model computes what it did."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.weights.trained import TEXT, write_trained
from tpi.errors import PlanError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor, PredictorMatrix, Weights
from tpi.sparsity.renumber import WINDOW, inverse, renumber, renumbered, renumbered_predictor
from tpi.sparsity.replay import F32, FfnWeights, chunks, dense, logits, replay
from tpi.sparsity.usage import NeuronUse, packed


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4).filter(any), st.integers(0, 1 << 20))
def test_an_order_is_fair_and_hot_first(shares: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    count = sum(shares)
    frequency = random.random(count) ** 3
    order = renumber(frequency, np.zeros((count, count), np.float32), shares)
    assert sorted(order) == list(range(count))
    assert (order[inverse(order)] == np.arange(count)).all()
    ranks = np.empty(count, int)
    ranks[np.argsort(-frequency)] = np.arange(count)
    ends = np.cumsum(shares)
    for share, end in zip(shares, ends, strict=True):
        run = ranks[order[end - share : end]]
        if share > WINDOW:  # all of a window are hotter than all of the next
            assert run[:WINDOW].max() < run[WINDOW:].min()
        for hottest in (count // 4, count // 2):  # each node has its share of the hottest
            assert abs((run < hottest).sum() - share * hottest / count) <= len(shares)


def test_neurons_that_come_together_stand_together() -> None:
    random = np.random.default_rng(0)
    groups = random.permutation(np.repeat(np.arange(8), 8))
    active = (random.random((500, 8)) < 0.2)[:, groups]
    use = NeuronUse.nothing("", 1, 64).plus(active.sum(axis=0)[None], packed(active[None]))
    order = renumber(use.frequency[0], use.together(0), [64])
    assert (np.diff(groups[order]) != 0).sum() == 7


@pytest.mark.parametrize("weights", ["f16", "q8"])
def test_a_renumbered_predictor_names_the_same_neurons(weights: Weights) -> None:
    random = np.random.default_rng(0)
    first, second = (random.standard_normal(size).astype(np.float32) for size in ((32, 64), (40, 32)))
    bias, order = random.standard_normal(40).astype(np.float32), random.permutation(40).astype(np.int32)
    made = Predictor(3, PredictorMatrix.of(first, weights), PredictorMatrix.of(second, weights), 0.5, 2, bias=bias)
    x = random.standard_normal((9, 64)).astype(np.float32)
    assert (renumbered_predictor(made, order).active(x) == made.active(x)[:, order]).all()


def test_shares_of_another_layer_are_refused() -> None:
    with pytest.raises(PlanError, match="are not the 3"):
        renumber(np.zeros(3), np.zeros((3, 3), np.float32), [1, 1])


def test_a_renumbered_model_equals_the_original(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    directory = write_trained(tmp_path / "model")
    pack_model(open_source(directory), "q8", tmp_path / "pack")
    pack, kernels, active = Pack.open(tmp_path / "pack"), open_kernels(), []
    tokens = chunks(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT.read_text()).ids, 64, 4)

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        active.append(weights.gated(x) != 0)
        return dense(layer, weights, x)

    expected = logits(pack, replay(pack, tokens, kernels, watch), kernels)
    seen = np.stack(active)
    use = NeuronUse.nothing("", *seen.shape[::2]).plus(seen.sum(axis=1), packed(seen))
    orders = [renumber(use.frequency[at], use.together(at), [256, 384, 128]) for at in range(use.layers)]

    def turned(layer: int, weights: FfnWeights, x: F32) -> F32:
        moved = renumbered(weights, orders[layer])
        assert np.allclose(moved.inner(x), weights.inner(x)[:, orders[layer]], atol=1e-4)
        return dense(layer, moved, x)

    found = logits(pack, replay(pack, tokens, kernels, turned), kernels)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.99
