"""Neurons that are predicted once for a block, and computed in their tiles."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import ffn_case, native, normal
from tpi.devices.host import open_host
from tpi.kernels.spec import F32, NO_TOKENS
from tpi.sparsity.predictor import InputKind
from worker.neurons.judge import SparsityJudge
from worker.neurons.sparse import SparseNode
from worker.node.microbatch import MicroBatch
from worker.node.order import COMPUTE
from worker.node.segment import FfnSegment

HIDDEN, UNITS, HOST = 64, 10, open_host()
NEURONS = 32 * UNITS


@dataclass
class Named:
    """A predictor that names set neurons, and counts its calls."""

    active: np.ndarray
    asked: int = 0
    threshold: float = 0.5
    ahead: int = 0
    input_kind: InputKind = "normed"

    def scores(self, x: F32, /) -> F32:
        self.asked += 1
        return np.tile(self.active.astype(np.float32), (len(x), 1))


@pytest.mark.parametrize("cut", [1, 4, 9])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("tokens", [1, 3])
def test_tiles_come_to_what_the_block_does(cut: int, share: float, tokens: int) -> None:
    random = np.random.default_rng([cut, tokens])
    case = ffn_case(random, format="f32", layout="record", hidden=HIDDEN, units=UNITS, activation="relu", bias=False)
    spec, active, x = case.spec, random.random(NEURONS) < share, normal(random, tokens, HIDDEN)
    scorer, judge = Named(active), SparsityJudge("static", 1.0)
    node = SparseNode({5: scorer}, judge)
    node.begin(short=True)
    part = MicroBatch(x, NO_TOKENS)
    for first, last in ((0, cut), (cut, UNITS)):
        tile = replace(spec, neuron=replace(spec.neuron, units=last - first))
        data = case.data[first * spec.neuron.unit_bytes : last * spec.neuron.unit_bytes]
        segment = node.adapt_segment(FfnSegment(HOST, HOST.start, tile), 5, 32 * first)
        pending = segment.start(COMPUTE, data, part, lambda _: x)
        assert pending is not None
        part.add(pending)
    expected = native.ffn(spec, case.data, x, np.flatnonzero(active).astype(np.int32))
    np.testing.assert_allclose(part.partial(), expected, atol=1e-4 * max(1e-6, float(np.abs(expected).max())))
    assert scorer.asked == 1
    assert (judge.chosen, judge.of) == (active.sum(), NEURONS)


def test_more_than_the_limit_are_all_computed() -> None:
    random = np.random.default_rng(0)
    case = ffn_case(random, format="f32", layout="record", hidden=HIDDEN, units=UNITS, activation="relu", bias=False)
    active, x = np.arange(NEURONS) < 0.5 * NEURONS, normal(random, 1, HIDDEN)
    for limit, dense in ((0.4, True), (0.6, False)):
        judge = SparsityJudge("static", limit)
        node = SparseNode({0: Named(active)}, judge)
        node.begin(short=True)
        segment = node.adapt_segment(FfnSegment(HOST, HOST.start, case.spec), 0, 0)
        pending = segment.start(COMPUTE, case.data, MicroBatch(x, NO_TOKENS), lambda _: x)
        assert pending is not None
        which = None if dense else np.flatnonzero(active).astype(np.int32)
        np.testing.assert_allclose(pending.wait(), native.ffn(case.spec, case.data, x, which), atol=1e-3)
        assert judge.dense == dense
