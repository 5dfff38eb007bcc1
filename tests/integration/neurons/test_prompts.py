"""Prompts and batches compute the union of their tokens' neurons, piece by piece, if costs say that it is faster."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.cluster.surprise import engine_perplexity
from tests.support.devices.neurons import relu_packs
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.predicted import all_predictors, exact_predictors
from tests.support.weights.trained import PREDICTORS, TRAINED, UNSEEN
from tpi.pack.reader import Pack
from tpi.sparsity.files import load_predictors
from tpi.sparsity.predictor import Predictor
from worker.neurons.judge import SHORT, SparsityJudge

ROOM: dict[str, Any] = {"context": 160, "pool": 64, "chunk": 64}
ALONE, THREE = [1.0], [3.0, 2.0, 1.0]
Predictors = Callable[[Pack], dict[int, Predictor]]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return relu_packs(tmp_path_factory.mktemp("relu"))("q8")


@pytest.fixture(scope="module")
def asked(pack: Pack) -> list[list[int]]:
    """Return requests of up to 100 tokens: chunks of 64 tokens, and steps with tokens of several requests."""
    found = prompts(pack.config.vocab, 12, seed=3, longest=100)
    assert max(map(len, found)) > 64
    return found


@pytest.fixture(scope="module")
def expected(pack: Pack, asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with closing(in_process_deployment(pack, ALONE, tmp_path_factory.mktemp("dense"), **ROOM)) as deployment:
        return answers(deployment, asked, 6)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the measured limit: the share of active neurons from which on computing all neurons is faster."""
    share = [1.0]
    monkeypatch.setattr("worker.neurons.judge.measure_limit", lambda *given: share[0])
    return share


def ran(
    pack: Pack, cache: Path, predictors: dict[int, Predictor], shares: list[float], asked: list[list[int]], **more: Any
) -> tuple[list[list[int]], SparsityJudge]:
    made = in_process_deployment(pack, shares, cache, predictors=predictors, **{"sparsity": "static"} | ROOM | more)
    with closing(made) as deployment:
        found = answers(deployment, asked, 6)
        assert deployment.node.sparse is not None
        return found, deployment.node.sparse.judge


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("shares", [ALONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize(
    "predictors",
    [exact_predictors, all_predictors, lambda pack: all_predictors(pack, 2)],
    ids=["exact", "all", "ahead"],
)
def test_long_steps_have_the_tokens_of_the_dense_run(
    predictors: Predictors, shares: list[float], pack: Pack, asked: list[list[int]], expected: list[list[int]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "worker.neurons.union.UnionCosts.should_predict", lambda *given: True
    )  # whatever that takes here
    found, judge = ran(pack, tmp_path, predictors(pack), shares, asked)
    assert found == expected
    assert any(size.shares for number, size in judge.costs._sizes.items() if 1 << number > 2 * SHORT)
    assert (judge.chosen < 0.9 * judge.of) == (predictors is exact_predictors)


def test_where_all_neurons_are_faster_they_are_computed(
    pack: Pack, asked: list[list[int]], expected: list[list[int]], limit: list[float], tmp_path: Path
) -> None:
    """This holds for the union of several tokens; a single token has few enough neurons."""
    limit[0] = 0.15
    found, judge = ran(pack, tmp_path, exact_predictors(pack), ALONE, asked)
    assert found == expected
    sizes = {number: size for number, size in judge.costs._sizes.items() if number and size.shares}
    assert sizes
    assert all(min(size.shares.values()) > 0.1 for size in sizes.values())
    assert max(max(size.unasked.values(), default=0) for size in sizes.values()) > 0  # and not predicted every time


def test_parallel_streams_find_out_whether_it_pays(pack: Pack, tmp_path: Path) -> None:
    streams = [prompt[:3] for prompt in prompts(pack.config.vocab, 4, seed=9)]
    made = in_process_deployment(
        pack, ALONE, tmp_path, predictors=exact_predictors(pack), sparsity="auto", **ROOM | {"context": 64}
    )
    with closing(made) as deployment:
        answers(deployment, streams, 40)
        assert deployment.node.sparse is not None
        judge = deployment.node.sparse.judge
        assert judge.predicting_is_faster(4) is not None
        assert judge.predicting_is_faster(1) is None
        assert "in steps of 3 to 4 tokens" in deployment.node.sparse.describe()


@pytest.mark.usefixtures("limit")
def test_what_follows_a_prompt_is_as_likely_as_after_a_dense_one(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained predictors leave out some active neurons, but fewer for the pieces of a prompt than for single tokens."""
    from tokenizers import Tokenizer

    monkeypatch.setattr("worker.neurons.union.UnionCosts.should_predict", lambda *given: True)
    ids = Tokenizer.from_file(str(TRAINED / "tokenizer.json")).encode(UNSEEN.read_text()).ids[: 6 * 150]
    found = {}
    for mode, predictors in (("off", None), ("static", load_predictors(PREDICTORS))):
        made = in_process_deployment(pack, ALONE, tmp_path / mode, predictors=predictors, sparsity=mode, **ROOM)
        with closing(made) as deployment:
            found[mode] = engine_perplexity(deployment, ids, 150, given=100)
    assert found["static"] == pytest.approx(found["off"], rel=0.01)
