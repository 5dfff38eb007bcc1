"""The judge of sparsity: it compares measured times of steps in turns."""

from typing import cast

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import ffn_case, native
from tpi.kernels import Kernels
from tpi.kernels.spec import F32, I32, U8, FfnSpec
from worker.neurons.forecast import measure_forecast
from worker.neurons.judge import SHORT, TURNS, SparsityJudge, measure_limit


def steps(judge: SparsityJudge, dense: float, sparse: float, tokens: int = 1, count: int = 4 * TURNS) -> list[bool]:
    """Run steps with given seconds, with all neurons and with predicted ones; return which steps were predicted."""
    taken = []
    for _ in range(count):
        judge.begin()
        taken.append(judge.predicts(tokens))
        if taken[-1]:
            judge.note_choice(10, 100, sparse / 4, sparse, tokens)
        judge.note(sparse if taken[-1] else dense, tokens)
    return taken


@pytest.mark.parametrize(("dense", "sparse", "pays"), [(2e-3, 1e-3, True), (1e-3, 2e-3, False)])
def test_what_takes_less_is_gone_on_with(dense: float, sparse: float, pays: bool) -> None:
    judge = SparsityJudge("auto")
    taken = steps(judge, dense, sparse)
    assert judge.predicting_is_faster() is pays
    assert taken[: 2 * TURNS : 2] != taken[1 : 2 * TURNS : 2]  # by turns
    assert set(taken[3 * TURNS :]) == {pays}


def test_a_sentence_says_what_was_measured() -> None:
    judge = SparsityJudge("auto")
    assert judge.describe() == ""
    steps(judge, 1e-3, 2e-3)
    assert "1.00 ms with all neurons and 2.00 ms with the 10% that are predicted" in judge.describe()
    judge = SparsityJudge("static")
    steps(judge, 1e-3, 2e-3)
    assert judge.describe().startswith("90.0% of the neurons were skipped")
    assert "25% of the feed-forward time" in judge.describe()


def test_parallel_streams_have_turns_of_their_own() -> None:
    judge = SparsityJudge("auto")
    for tokens, dense, sparse, pays in ((1, 2e-3, 1e-3, True), (4, 4e-3, 8e-3, False), (2, 4e-3, 2e-3, True)):
        taken = steps(judge, dense, sparse, tokens)
        assert judge.predicting_is_faster(tokens) is pays
        assert taken[1:16:2] != taken[:16:2]
        assert set(taken[3 * TURNS :]) == {pays}
    assert judge.predicting_is_faster(3) is False  # as 4
    assert "sparsity is off in steps of 3 to 4 tokens, it does not pay here: a token's" in judge.describe()
    assert "1.00 ms with all neurons and 2.00 ms with the 10% that are predicted" in judge.describe()


def test_a_step_that_breaks_off_tells_nothing() -> None:
    judge = SparsityJudge("auto")
    steps(judge, 1.0, 2.0, count=5)
    for _ in range(4 * TURNS):
        judge.begin()
        judge.note(100.0, 1)
        judge.abandon()
    steps(judge, 1.0, 2.0)
    assert "1000.00 ms with all neurons and 2000.00 ms" in judge.describe()


def test_long_steps_take_no_turns() -> None:
    judge = SparsityJudge("auto")
    assert all(steps(judge, 1.0, 2.0, tokens=SHORT + 1))  # their costs decide, block by block
    assert judge.predicting_is_faster(SHORT + 1) is None


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_what_is_asked_for_is_done(mode: str) -> None:
    assert all(steps(SparsityJudge(mode), 1.0, 2.0))  # type: ignore[arg-type]


def test_the_limit_is_a_share() -> None:
    case = ffn_case(np.random.default_rng(0), format="q4", layout="record", hidden=64, units=10, activation="relu")
    assert 0 < measure_limit(native, case.spec, case.data) <= 1
    many = np.ones((20, 64), np.float32)
    assert 0 < measure_limit(native, case.spec, case.data, x=many) <= 1


@pytest.mark.parametrize(("predicting", "pays"), [(1e-3, True), (4e-3, False)])
def test_a_forecast_counts_the_prediction(predicting: float, pays: bool) -> None:
    """All neurons take 4 ms, and those of the list as much for each as all of them do."""
    case, now, took = ffn_case(np.random.default_rng(0), units=4, hidden=64, layout="record"), 0.0, list[int]()

    class Timed:
        def ffn(self, spec: FfnSpec, data: U8, x: F32, active: I32 | None = None) -> F32:
            nonlocal now
            count = 128 if active is None else len(active)
            took.append(count)
            now += 4e-3 * count / 128
            return native.ffn(spec, data, x, active)

    def predict(x: F32) -> None:
        nonlocal now
        assert x.shape == (1, 64)
        now += predicting

    kernels = cast(Kernels, Timed())
    found = measure_forecast(kernels, case.spec, case.data, predict, 0.25, lambda: now)
    assert set(took) == {128, 32}
    assert found.everything == pytest.approx(4e-3)
    assert found.active == pytest.approx(1e-3)
    assert found.pays is pays
    assert found.describe() == "" if pays else "with the 25% that would be predicted" in found.describe()
