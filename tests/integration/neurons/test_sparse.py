"""Nodes that compute active neurons alone: the tokens of the dense run, alone and in a group, within their memory."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.regular import NeuronUse, write_regular
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, prompts
from tests.support.devices.predicted import all_predictors, exact_predictors
from tests.support.weights.shapes import LLAMA_1B
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor
from worker.neurons import sparse
from worker.neurons.judge import TURNS, Judge

SMALL: dict[str, Any] = {"context": 64, "pool": 96}
SHAPE: dict[str, Any] = LLAMA_1B | {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
Predictors = Callable[[Pack], dict[int, Predictor]]


@pytest.fixture(scope="module")
def relu_pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    directory = tmp_path_factory.mktemp("relu")
    return lambda dtype: write_regular(directory / dtype, SHAPE, NeuronUse(rank=32), dtype)


@pytest.fixture
def never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are active, they are computed by their list."""
    monkeypatch.setattr(sparse, "measure_limit", lambda *given: 1.0)
    monkeypatch.setattr("worker.neurons.judge._UNMEASURED", 1.0)


def answered(
    pack: Pack, cache: Path, predictors: Mapping[int, Predictor] | None, shares: list[float], **more: Any
) -> tuple[list[list[int]], Judge | None, Any]:
    """Greedy answers to prompts of one and of several sequences, the judge of rank 0, and its budget."""
    asked = [prompts(pack.config.vocab, count, seed=count, longest=20) for count in (1, 4)]
    mode = "off" if predictors is None else more.pop("mode", "static")
    made = in_process_deployment(pack, shares, cache, predictors=predictors, sparsity=mode, **SMALL | more)
    with closing(made) as deployment:
        found = [answer for some in asked for answer in answers(deployment, some, 12)]
        chosen = deployment.node.sparse
        return found, None if chosen is None else chosen.judge, deployment.node.budget


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
@pytest.mark.parametrize("shares", [[1.0], [3.0, 2.0, 1.0]], ids=["one", "three"])
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
