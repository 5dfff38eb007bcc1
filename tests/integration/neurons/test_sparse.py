"""Nodes that compute only active neurons: the tokens of the dense run, on one node and several, within their memory."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from master.options import RunOptions, Sparsity
from master.workers.predictors import predictors_for
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.predicted import all_predictors, exact_predictors
from tests.support.weights.trained import write_trained
from tpi.errors import UsageError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor
from worker.neurons.forecast import SparsityForecast
from worker.neurons.judge import SparsityJudge

SMALL: dict[str, Any] = {"context": 64, "pool": 96}
Predictors = Callable[[Pack], dict[int, Predictor]]


@pytest.fixture(scope="module")
def relu_pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    """The trained model, whose tokens depend on each of its neurons."""
    directory = tmp_path_factory.mktemp("trained")

    def packed(dtype: str) -> Pack:
        if not (directory / dtype).exists():
            pack_model(open_source(write_trained(directory / "model")), dtype, directory / dtype)
        return Pack.open(directory / dtype)

    return packed


@pytest.fixture
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the node compute neurons by their list, however many are active."""
    monkeypatch.setattr("worker.neurons.judge.measure_limit", lambda *given: 1.0)
    monkeypatch.setattr("worker.neurons.judge._UNMEASURED", 1.0)


def answered(
    pack: Pack, cache: Path, predictors: Mapping[int, Predictor] | None, shares: list[float], **more: Any
) -> tuple[list[list[int]], SparsityJudge | None, Any]:
    """Return greedy answers to prompts of one and of several sequences, the judge of rank 0, and its budget."""
    asked = [prompts(pack.config.vocab, count, seed=count, longest=20) for count in (1, 4)]
    mode = "off" if predictors is None else more.pop("mode", "static")
    made = in_process_deployment(pack, shares, cache, predictors=predictors, sparsity=mode, **SMALL | more)
    with closing(made) as deployment:
        found = [answer for some in asked for answer in answers(deployment, some, 12)]
        chosen = deployment.node.sparse
        return found, None if chosen is None else chosen.judge, deployment.node.budget


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize(
    ("dtype", "shares"), [("q8", [1.0]), ("f32", [3.0, 2.0, 1.0]), ("q4", [3.0, 2.0, 1.0])], ids=["one", "three", "q4"]
)
@pytest.mark.parametrize(
    "predictors",
    [all_predictors, exact_predictors, lambda pack: all_predictors(pack, 2)],
    ids=["all", "exact", "ahead"],
)
def test_tokens_are_those_of_the_dense_run(
    dtype: str, shares: list[float], predictors: Predictors, relu_pack: Callable[[str], Pack], tmp_path: Path
) -> None:
    pack = relu_pack(dtype)
    expected, nobody, _ = answered(pack, tmp_path, None, shares)
    found, judge, _ = answered(pack, tmp_path, predictors(pack), shares)
    assert found == expected
    assert nobody is None
    assert judge is not None
    assert judge.of
    assert (judge.chosen < 0.7 * judge.of) == (predictors is exact_predictors)


def test_a_batch_and_a_stream_from_disk_have_the_same_tokens(relu_pack: Callable[[str], Pack], tmp_path: Path) -> None:
    """With the measured limit, and in tiles that are streamed."""
    pack = relu_pack("q8")
    expected, _, _ = answered(pack, tmp_path, None, [1.0])
    found, judge, _ = answered(pack, tmp_path, exact_predictors(pack), [1.0], scheduler="window", window=2)
    assert found == expected
    assert judge is not None
    assert judge.measured()


def test_predictors_count_in_the_budget(relu_pack: Callable[[str], Pack], tmp_path: Path) -> None:
    pack = relu_pack("f32")
    predictors = exact_predictors(pack)
    _, _, dense = answered(pack, tmp_path, None, [1.0])
    _, _, sparse_one = answered(pack, tmp_path, predictors, [1.0])
    more = sparse_one.used - dense.used
    assert more >= sum(one.memory_bytes for one in predictors.values())


@pytest.mark.parametrize("pays", [True, False])
def test_auto_forecasts_then_decides_by_turns(
    pays: bool, relu_pack: Callable[[str], Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If predicting does not pay by the times measured at the start, all blocks are one chain in every step."""
    pack = relu_pack("q8")
    expected, _, _ = answered(pack, tmp_path, None, [1.0])
    times = (3e-3, 1e-3, 1e-3) if pays else (1e-3, 2e-3, 1e-3)
    forecast = SparsityForecast(*times, 0.5)
    monkeypatch.setattr("worker.neurons.sparse.measure_forecast", lambda *given: forecast)
    asked = [prompts(pack.config.vocab, count, seed=count, longest=20) for count in (1, 4)]
    monkeypatch.setattr("worker.neurons.sparse._expected_share", lambda *given: 0.5)  # as with a profile
    made = in_process_deployment(pack, [1.0], tmp_path, predictors=exact_predictors(pack), sparsity="auto", **SMALL)
    with closing(made) as deployment:
        assert [answer for some in asked for answer in answers(deployment, some, 12)] == expected
        node = deployment.node
        assert node.sparse is not None
        assert bool(node.sparse.judge.of) is pays
        assert (node.loop.weights.now.kept is None) is pays
        said = node.figures().accelerator
        assert ("a feed-forward block takes 1.000 ms with all neurons, and 3.000 ms" in said) is not pays


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_without_predictors_it_says_how_to_make_them(
    mode: Sparsity, relu_pack: Callable[[str], Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("master.workers.predictors.load_predictors", lambda path: {})
    with pytest.raises(UsageError, match=r"tpi profile -m mine --text FILE --predictors$"):
        predictors_for(RunOptions("mine", sparsity=mode), relu_pack("q8"))
    other = RunOptions("my own", sparsity=mode, dtype="q8", cache=Path("/else where"))
    with pytest.raises(UsageError, match=r"-m 'my own' --dtype q8 --cache '/else where' --text FILE --predictors$"):
        predictors_for(other, relu_pack("q8"))
    assert predictors_for(RunOptions("mine"), relu_pack("q8")) is None


def test_activations_that_are_never_zero_are_refused(tiny_pack: Callable[..., Pack]) -> None:
    with pytest.raises(UsageError, match="never 0"):
        predictors_for(RunOptions("mine", sparsity="static"), tiny_pack("llama"))
    assert predictors_for(RunOptions("mine"), tiny_pack("llama")) is None
