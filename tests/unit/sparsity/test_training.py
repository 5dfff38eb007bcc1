"""Predictors are trained: as wide as a layer needs, within the bytes allowed; on the trained model as good as asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.weights.trained import TEXT, write_trained
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.files import load_predictors, save_predictors
from tpi.sparsity.replay import F32, FfnWeights, chunks, dense, replay
from tpi.sparsity.training import LayerExamples, TrainedPredictor, TrainingRecipe, measured, train_predictors

RECIPE = TrainingRecipe(steps=80, tokens=64, rate=6e-3)
LIMIT = 0.06  # of the pack's bytes


def made(layer: int, rank: int, tokens: int = 2000, neurons: int = 96, hidden: int = 64) -> LayerExamples:
    """A layer whose gates have a rank, and one active neuron in six."""
    random = np.random.default_rng(layer)
    x = random.standard_normal((tokens, hidden)).astype(np.float32)
    gates = random.standard_normal((neurons, rank)) @ random.standard_normal((rank, hidden))
    return LayerExamples(layer, x, x @ gates.T > np.sqrt(rank * hidden))


def test_a_layer_that_is_hard_to_predict_gets_wider() -> None:
    found = train_predictors({0: made(0, 4), 1: made(1, 40)}, 1e6, replace(RECIPE, chosen=1.4, steps=200))
    easy, hard = found[0], found[1]
    assert easy.predictor.rank == 32 < hard.predictor.rank
    assert easy.chosen <= 1.4
    assert min(easy.recall, hard.recall) >= RECIPE.recall


def test_they_never_take_more_than_they_may() -> None:
    layers = {0: made(0, 40), 1: made(1, 40)}
    narrow = train_predictors(layers, 1e6, replace(RECIPE, chosen=1e9, steps=1))
    taken = sum(one.predictor.nbytes for one in narrow.values())
    limit = taken * 1.6
    grown = train_predictors(layers, limit, replace(RECIPE, chosen=1.0, steps=1))
    assert taken < sum(one.predictor.nbytes for one in grown.values()) <= limit
    with pytest.raises(ModelError, match="narrowest predictors take"):
        train_predictors(layers, taken - 1, replace(RECIPE, steps=1))


def test_a_seed_decides_what_is_trained(tmp_path: Path) -> None:
    def kept(seed: int, name: str) -> bytes:
        trained = train_predictors({0: made(0, 8)}, 1e6, replace(RECIPE, seed=seed, steps=20, chosen=1e9))
        save_predictors(tmp_path / name, [one.predictor for one in trained.values()])
        return (tmp_path / name).read_bytes()

    assert kept(1, "a") == kept(1, "b") != kept(2, "c")


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="too few"):
        train_predictors({0: made(0, 4, tokens=2)}, 1e6, RECIPE)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[F32], list[FfnWeights]]:
    """The size of the trained model's pack, and what its feed-forward networks are given for its text."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("trained")
    directory = write_trained(folder / "model")
    pack_model(open_source(directory), "f32", folder / "pack")
    pack, inputs, layers = Pack.open(folder / "pack"), [], []
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT.read_text()).ids

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        inputs.append(x.copy())
        layers.append(weights)
        return dense(layer, weights, x)

    replay(pack, chunks(ids, 128, 96), open_kernels(), watch)
    return pack.weight_bytes, inputs, layers


def test_the_trained_models_neurons_are_predicted(
    examples: tuple[int, list[F32], list[FfnWeights]], tmp_path: Path
) -> None:
    """95% of the active neurons with at most 1.5 times as many chosen, in 6% of the bytes; on text not trained on."""
    nbytes, inputs, layers = examples
    active = [weights.gated(x) != 0 for weights, x in zip(layers, inputs, strict=True)]
    seen = len(inputs[0]) * 7 // 8
    learned = {at: LayerExamples(at, x[:seen], active[at][:seen]) for at, x in enumerate(inputs)}
    recipe = TrainingRecipe(rank=96, steps=150, tokens=128, rate=6e-3, margin=0.01)
    trained = train_predictors(learned, LIMIT * nbytes, recipe)
    save_predictors(tmp_path / "predictors", [one.predictor for one in trained.values()], "trained")
    kept = load_predictors(tmp_path / "predictors")
    right, chosen, wanted = 0.0, 0.0, 0
    for at, x in enumerate(inputs):
        count = int(active[at][seen:].sum())
        recall, factor = measured(kept[at], x[seen:], active[at][seen:])
        assert recall > 0.93, f"layer {at}"
        right, chosen, wanted = right + recall * count, chosen + factor * count, wanted + count
    assert right / wanted >= 0.95
    assert chosen / wanted <= 1.5
    assert sum(one.nbytes for one in kept.values()) <= LIMIT * nbytes


def test_a_predictor_that_looks_ahead_knows_more_than_frequencies(
    examples: tuple[int, list[F32], list[FfnWeights]],
) -> None:
    _, inputs, layers = examples
    active = layers[2].gated(inputs[2]) != 0
    seen = len(active) * 7 // 8
    recipe = TrainingRecipe(rank=32, steps=60, tokens=128, rate=6e-3, chosen=1e9)
    learned = LayerExamples(2, inputs[1][:seen], active[:seen], ahead=1)
    one: TrainedPredictor = train_predictors({2: learned}, 1e9, recipe)[2]
    recall, factor = measured(one.predictor, inputs[1][seen:], active[seen:])
    taken = np.argsort(-active[:seen].mean(axis=0))[: round(factor * active[seen:].sum(axis=1).mean())]
    assert one.predictor.ahead == 1
    assert recall > active[seen:][:, taken].sum() / active[seen:].sum() + 0.02
