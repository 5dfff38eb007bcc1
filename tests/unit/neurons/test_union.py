"""The union of a step of any length, piece by piece, and whether costs say that predicting pays off."""

from dataclasses import dataclass, field
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.neurons.sizes import size_class, size_name
from tests.support.kernels.kernel_cases import ffn_case, native, normal
from tpi.devices.host import HostDevice
from tpi.kernels.spec import NO_TOKENS
from tpi.sparsity.predictor import InputKind
from worker.neurons.fallback import ASKED_AGAIN
from worker.neurons.judge import SparsityJudge
from worker.neurons.prediction import Predictions
from worker.neurons.sparse import SparseNode
from worker.neurons.union import F32, PIECE, SCORED, Union, UnionCosts, union_of
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE
from worker.node.segment import FfnSegment

HOST = HostDevice(native)
HIDDEN, UNITS = 64, 10
NEURONS = 32 * UNITS
LAYER, LONG, NAMED = 3, 100, 0.2


@dataclass(eq=False)
class Drawn:
    """Scores that depend only on the input; counts its calls."""

    threshold: float = 0.0
    ahead: int = 0
    input_kind: InputKind = "residual"
    asked: list[int] = field(default_factory=list)

    def scores(self, x: F32, /) -> F32:
        self.asked.append(len(x))
        projected = np.random.default_rng(5).normal(size=(x.shape[1], NEURONS)).astype(np.float32)
        return np.asarray(x @ projected - np.float32(8), np.float32)


@given(
    tokens=st.integers(2, 5 * PIECE), neurons=st.sampled_from([1, 40, 3 * SCORED // 16]),
    share=st.floats(0, 0.5), most=st.sampled_from([inf, 1.0, 0.6, 0.2, 0.0]), seed=st.integers(0, 1 << 16),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_each_piece_has_its_tokens_neurons_up_to_a_limit(
    tokens: int, neurons: int, share: float, most: float, seed: int
) -> None:
    scores = (np.random.default_rng(seed).random((tokens, neurons), np.float32) < share).astype(np.float32)
    asked: list[int] = []

    def score(x: F32) -> F32:
        asked.append(len(x))
        return np.asarray(scores[x[:, 0].astype(int)], np.float32)

    found = union_of(score, 0.5, np.arange(tokens, dtype=np.float32)[:, None], most)
    pieces = [scores[at : at + PIECE].any(axis=0) for at in range(0, tokens, PIECE)]
    mean = sum(piece.sum() for piece in pieces) / (len(pieces) * neurons)
    assert found.exceeded == (found.share > most)
    assert found.exceeded == (mean > most + 1e-12) or mean == pytest.approx(most)
    assert max(asked) <= max(PIECE, SCORED // (4 * neurons))  # in so many bytes, however long the step is
    if not found.exceeded:
        assert found.share == pytest.approx(mean)
        assert found.active.tolist() == np.flatnonzero(scores.any(axis=0)).tolist()
        lists = found.pieces or (found.active,)
        assert [one.tolist() for one in lists] == [np.flatnonzero(piece).tolist() for piece in pieces]
    assert (found.tokens, found.neurons) == (sum(asked), neurons)


@pytest.mark.parametrize("tokens", [1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_a_block_comes_to_what_each_pieces_neurons_do(tokens: int) -> None:
    random = np.random.default_rng(tokens)
    case = ffn_case(random, format="f32", layout="record", hidden=HIDDEN, units=UNITS, activation="relu", bias=False)
    scorer, judge = Drawn(), SparsityJudge("static", 1.0)
    node, x = SparseNode({0: scorer}, judge), normal(random, tokens, HIDDEN)
    active = scorer.scores(x) >= 0
    node.begin(short=True)
    segment = node.adapt_segment(FfnSegment(HOST, HOST.start, case.spec), 0, 0)
    pending = segment.start(COMPUTE, case.data, MicroBatch(x, NO_TOKENS), lambda _: x)
    assert pending is not None
    found = pending.wait()
    lists = [np.flatnonzero(active[at : at + PIECE].any(axis=0)).astype(np.int32) for at in range(0, tokens, PIECE)]
    for number, one in enumerate(lists):
        piece = slice(number * PIECE, (number + 1) * PIECE)
        expected = native.ffn(case.spec, case.data, x[piece], one)
        np.testing.assert_allclose(found[piece], expected, atol=1e-4 * float(np.abs(expected).max()))
    assert (judge.chosen, judge.of) == (sum(map(len, lists)), NEURONS * len(lists))
    assert 0 < judge.chosen < judge.of


def test_alternating_micro_batches_have_their_own_predictions() -> None:
    """Both halves of a prompt are in a layer, then both in the next."""
    random = np.random.default_rng(1)
    case = ffn_case(random, format="f32", layout="record", hidden=HIDDEN, units=UNITS, activation="relu", bias=False)
    scorer = Drawn(ahead=1)
    predictions, costs = Predictions({1: scorer}), UnionCosts(1.0)
    parts = [MicroBatch(normal(random, 20, HIDDEN), NO_TOKENS) for _ in range(2)]
    for part in parts:
        assert predictions.choose(0, case.spec, HOST, part, costs) is None
    chosen = [predictions.choose(1, case.spec, HOST, part, costs) for part in parts]
    assert sum(scorer.asked) == sum(len(part.x) for part in parts)  # none of them twice
    for part, one in zip(parts, chosen, strict=True):
        assert one is not None
        assert one.active.tolist() == np.flatnonzero((scorer.scores(part.x) >= 0).any(axis=0)).tolist()


def costs_of(predicting: float, share: float, limit: float = 0.8) -> UnionCosts:
    """Return the costs after a step: all neurons take 1 s for each token and neuron, predicting takes `predicting`."""
    costs, count = UnionCosts(), 1000
    costs.learn(LONG, limit)
    active = np.arange(int(share * count), dtype=np.int32)
    costs.record_prediction(LAYER, Union(active, None, (), count, share, LONG), LONG, predicting * count * LONG)
    costs.record_computation(LONG, count, share, share / limit * count * LONG)  # as its limit says
    return costs


@pytest.mark.parametrize(
    ("predicting", "share", "pays"),
    [(0.1, 0.2, True), (0.1, 0.7, True), (0.1, 0.74, False), (0.5, 0.3, True), (0.5, 0.45, False), (1.1, 0.1, False)],
)
def test_predicting_and_computing_some_is_to_take_less_than_all(predicting: float, share: float, pays: bool) -> None:
    costs = costs_of(predicting, share)
    assert costs.should_predict(LAYER, LONG) is pays
    assert costs.should_predict(LAYER + 1, LONG)  # nothing is known of it
    assert costs.should_predict(LAYER, 2)  # nor of steps as short


def test_all_neurons_are_timed_where_they_are_computed() -> None:
    costs = costs_of(0.5, 0.45)
    assert not costs.should_predict(LAYER, LONG)
    for _ in range(8):
        costs.record_computation(LONG, 1000, 1, 3.0 * 1000 * LONG)  # three times as long as was thought
    assert costs.should_predict(LAYER, LONG)


def test_it_is_asked_again_after_a_while() -> None:
    costs = costs_of(1.1, 0.1)
    asked = [costs.should_predict(LAYER, LONG) for _ in range(2 * (ASKED_AGAIN + 1))]
    assert asked == ([False] * ASKED_AGAIN + [True]) * 2


def test_a_union_of_nearly_all_neurons_is_not_predicted_again() -> None:
    random = np.random.default_rng(0)
    case = ffn_case(random, format="f32", layout="record", hidden=HIDDEN, units=UNITS, activation="relu", bias=False)
    scorer, judge = Drawn(threshold=-1e9), SparsityJudge("static", NAMED)
    node, x = SparseNode({0: scorer}, judge), normal(random, 20 * PIECE, HIDDEN)
    segment = node.adapt_segment(FfnSegment(HOST, HOST.start, case.spec), 0, 0)
    for _ in range(3):
        node.begin(short=False)
        pending = segment.start(COMPUTE, case.data, MicroBatch(x, NO_TOKENS), lambda _: x)
        assert pending is not None
        np.testing.assert_allclose(pending.wait(), native.ffn(case.spec, case.data, x), atol=1e-4)
    assert sum(scorer.asked) < len(x)  # it broke off, once
    assert judge.of == 0


def test_sizes_are_powers_of_two() -> None:
    names = {tokens: size_name(size_class(tokens)) for tokens in (1, 2, 3, 4, 5, 8, 9, 128)}
    assert names == {
        1: "1 token", 2: "2 tokens", 3: "3 to 4 tokens", 4: "3 to 4 tokens", 5: "5 to 8 tokens", 8: "5 to 8 tokens",
        9: "9 to 16 tokens", 128: "65 to 128 tokens",
    }  # fmt: skip
