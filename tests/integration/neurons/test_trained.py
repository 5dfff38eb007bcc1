"""The trained ReGLU model through the real engine, with trained predictors: what leaving neurons out costs.

`predictors.safetensors` was made by `tpi profile --dtype q8 --text held_out.txt --predictors`, which trains on all but
the last 15% of the text. Those last tokens are what is measured here.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.cluster.surprise import engine_perplexity
from tests.support.weights.trained import TEXT, TRAINED, write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.examples import examples_of
from tpi.sparsity.files import load_predictors
from tpi.sparsity.replay import chunks
from tpi.sparsity.training import measured
from worker.neurons.judge import Judge

LENGTH, TOKENS = 250, 2000  # all whole pieces of those last 15%


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    directory = tmp_path_factory.mktemp("trained")
    pack_model(open_source(write_trained(directory / "model")), "q8", directory / "q8")
    return Pack.open(directory / "q8")


def _ids() -> list[int]:
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(TRAINED / "tokenizer.json")).encode(TEXT.read_text()).ids
    return found


def perplexity(pack: Pack, cache: Path, shares: list[float], sparsity: str) -> tuple[float, Judge | None]:
    """Of the end of the text, one token a step; and what rank 0 skipped."""
    ids = _ids()[-TOKENS:]
    predictors = None if sparsity == "off" else load_predictors(TRAINED / "predictors.safetensors")
    made = in_process_deployment(pack, shares, cache, predictors=predictors, sparsity=sparsity, context=256)
    with closing(made) as deployment:
        found = engine_perplexity(deployment, ids, LENGTH)
        chosen = deployment.node.sparse
        return found, None if chosen is None else chosen.judge


@pytest.mark.parametrize("shares", [[1.0], [3.0, 2.0, 1.0]], ids=["one", "three"])
def test_perplexity_stays_within_a_hundredth_of_the_dense_run(pack: Pack, shares: list[float], tmp_path: Path) -> None:
    dense, _ = perplexity(pack, tmp_path, [1.0], "off")
    found, judge = perplexity(pack, tmp_path, shares, "static")
    assert found == pytest.approx(dense, rel=0.01)
    assert judge is not None
    assert judge.chosen < 0.25 * judge.of


def test_predictors_are_small_and_name_few_neurons_beside_the_active(pack: Pack) -> None:
    """95% of the active ones, with at most 1.5 times as many, on tokens that they did not learn from."""
    predictors = load_predictors(TRAINED / "predictors.safetensors")
    assert sum(one.nbytes for one in predictors.values()) < 0.06 * pack.weight_bytes
    examples = examples_of(pack, chunks(_ids()[-TOKENS:], LENGTH), open_kernels())
    active = np.array([one.rows(slice(None))[1].sum() for one in examples.values()])
    found = np.array([measured(predictors[layer], one) for layer, one in examples.items()])
    recall, chosen = active @ found / active.sum()
    assert recall >= 0.95
    assert chosen <= 1.5
