"""Renumbering: a permutation, fair to nodes, hot neurons first, co-active neurons together."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpi.errors import ModelError, PlanError
from tpi.sparsity.predictor import Predictor, PredictorMatrix, Weights
from tpi.sparsity.renumber import (
    inverse,
    load_imbalance,
    load_orders,
    renumber,
    renumbered_predictor,
    renumbered_profile,
    runs_of_active,
    save_orders,
    window,
)
from tpi.sparsity.usage import NeuronProfile, pack_bits


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4).filter(any), st.integers(0, 1 << 20))
def test_an_order_is_fair_and_hot_first(shares: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    count = sum(shares)
    frequency = random.random(count) ** 3
    order = renumber(frequency, random.random((9, count)) < frequency, shares)
    assert sorted(order) == list(range(count))
    assert (order[inverse(order)] == np.arange(count)).all()
    ranks = np.empty(count, int)
    ranks[np.argsort(-frequency)] = np.arange(count)
    ends = np.cumsum(shares)
    for share, end in zip(shares, ends, strict=True):
        run = ranks[order[end - share : end]]
        size = window(share)
        for at in range(size, share, size):  # all of a window are hotter than all of the next
            assert run[:at].max() < run[at:].min()
        for hottest in (count // 4, count // 2):  # each node has its share of the hottest
            assert abs((run < hottest).sum() - share * hottest / count) <= len(shares)


def test_neurons_that_come_together_stand_together() -> None:
    random = np.random.default_rng(0)
    groups = random.permutation(np.repeat(np.arange(8), 8))
    active = (random.random((500, 8)) < 0.2)[:, groups]
    use = NeuronProfile.empty("", 1, 64).extended(active.sum(axis=0)[None], pack_bits(active[None]))
    order = renumber(use.frequency[0], use.active(0), [64])
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
    with pytest.raises(PlanError, match="do not add up to the layer"):
        renumber(np.zeros(3), np.zeros((2, 3), np.bool_), [1, 1])


def test_runs_are_counted_and_nodes_compared() -> None:
    active = np.zeros((2, 8), bool)
    active[0, [0, 1, 5]] = active[1, [2, 7]] = True
    use = NeuronProfile.empty("", 1, 8).extended(active.sum(axis=0)[None], pack_bits(active[None]))
    order = np.array([0, 1, 5, 2, 7, 3, 4, 6], np.int32)
    assert runs_of_active(use) == 2
    assert runs_of_active(use, [order]) == 1
    moved = renumbered_profile(use, [order])
    assert moved.counts.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert moved.tokens == 2
    assert load_imbalance(use.counts, [(0, 8)]) == 1
    assert load_imbalance(use.counts, [(0, 4), (4, 8)]) == pytest.approx(3 / 5 / 0.5)
    assert load_imbalance(moved.counts, [(0, 4), (4, 4), (4, 8)]) == pytest.approx(4 / 5 / 0.5)


def test_orders_come_back(tmp_path: Path) -> None:
    orders = np.stack([np.random.default_rng(seed).permutation(9) for seed in range(3)]).astype(np.int32)
    save_orders(tmp_path / "orders", list(orders), "this")
    found, of = load_orders(tmp_path / "orders")
    assert of == "this"
    assert (found == orders).all()
    save_orders(tmp_path / "orders", [orders[0], np.zeros(9, np.int32)], "this")
    for content in (None, b"", b"PK\x03\x04 nothing"):
        if content is not None:
            (tmp_path / "orders").write_bytes(content)
        with pytest.raises(ModelError, match="profile the model again"):
            load_orders(tmp_path / "orders")
