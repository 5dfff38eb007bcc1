"""The trained ReGLU model through the real engine, with trained predictors: what leaving neurons out costs.

`predictors.safetensors` was made by `python -m benchmarks.training.predictors --keep`. All is measured on `unseen.txt`:
documents that the model was not trained on, that predictors did not learn from, and that neither their thresholds nor
their widths were chosen on (docs/sparsity.md, "Making predictors").
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.cluster.surprise import engine_perplexity
from tests.support.devices.predicted import predicted_only
from tests.support.examples import examples_of
from tests.support.perplexity import perplexity
from tests.support.weights.trained import PREDICTORS, TRAINED, UNSEEN, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.files import load_predictors
from tpi.sparsity.replay import I32, cut_sequences
from tpi.sparsity.training import measure_predictor
from worker.neurons.judge import SparsityJudge

LENGTH, PIECES = 250, 4  # tokens of a piece; pieces that go through the engine, from all over the text


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    directory = tmp_path_factory.mktemp("trained")
    pack_model(open_source(write_trained(directory / "model")), "q8", directory / "q8")
    return Pack.open(directory / "q8")


def _pieces() -> I32:
    """Return pieces of the unseen text, `[pieces, LENGTH]`."""
    from tokenizers import Tokenizer

    return cut_sequences(Tokenizer.from_file(str(TRAINED / "tokenizer.json")).encode(UNSEEN.read_text()).ids, LENGTH)


def through_engine(pack: Pack, cache: Path, shares: list[float], sparsity: str) -> tuple[float, SparsityJudge | None]:
    """Return the perplexity, one token a step, and the judge of rank 0; None if all neurons are computed."""
    pieces = _pieces()
    ids = pieces[:: len(pieces) // PIECES][:PIECES].reshape(-1).tolist()
    predictors = None if sparsity == "off" else load_predictors(PREDICTORS)
    made = in_process_deployment(pack, shares, cache, predictors=predictors, sparsity=sparsity, context=256)
    with closing(made) as deployment:
        found = engine_perplexity(deployment, ids, LENGTH)
        chosen = deployment.node.sparse
        return found, None if chosen is None else chosen.judge


@pytest.fixture(scope="module")
def dense(pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The perplexity if all neurons are computed."""
    return through_engine(pack, tmp_path_factory.mktemp("dense"), [1.0], "off")[0]


@pytest.mark.parametrize("shares", [[1.0], [3.0, 2.0, 1.0]], ids=["one", "three"])
def test_perplexity_stays_within_a_hundredth_of_the_dense_run(
    pack: Pack, dense: float, shares: list[float], tmp_path: Path
) -> None:
    found, judge = through_engine(pack, tmp_path, shares, "static")
    assert found == pytest.approx(dense, rel=0.01)
    assert judge is not None
    assert judge.chosen < 0.25 * judge.of


def test_predictors_are_small_and_name_few_inactive_neurons(pack: Pack) -> None:
    """In each layer they name 95% of the active neurons and at most 1.5 neurons for each.

    They take 6% of the pack's bytes.
    """
    predictors = load_predictors(PREDICTORS)
    assert sum(one.nbytes for one in predictors.values()) <= 0.06 * pack.weight_bytes
    examples = examples_of(pack, _pieces(), open_kernels())
    found = np.array([measure_predictor(predictors[layer], one) for layer, one in examples.items()])
    assert len(found) == pack.config.layers
    assert found[:, 0].min() >= 0.95
    assert found[:, 1].max() <= 1.5


def test_perplexity_of_unseen_text_stays_within_a_hundredth(pack: Pack) -> None:
    predicted, kernels, pieces = predicted_only(load_predictors(PREDICTORS)), open_kernels(), _pieces()
    dense = perplexity(pack, pieces, kernels)
    assert perplexity(pack, pieces, kernels, predicted) == pytest.approx(dense, rel=0.01)
