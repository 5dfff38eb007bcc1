"""The training of predictors: as wide as a layer needs, within the allowed bytes, and as good as required."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from master.text.tokenizer import Tokenizer
from tests.support.devices.predicted import predicted_only
from tests.support.examples import examples_of
from tests.support.perplexity import perplexity
from tests.support.weights.trained import TEXT, write_trained
from tpi.errors import ModelError
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.examples import LayerExamples
from tpi.sparsity.files import load_predictors, save_predictors
from tpi.sparsity.replay import I32, cut_sequences
from tpi.sparsity.training import TrainedPredictor, TrainingRecipe, measure_predictor, train_predictors

RECIPE = TrainingRecipe(steps=80, tokens=64, rate=6e-3)
LIMIT = 0.06  # of the pack's bytes


def made(layer: int, rank: int, tokens: int = 2000, neurons: int = 96, hidden: int = 64) -> LayerExamples:
    """Return examples of a layer whose gates have a given rank, with one active neuron in six."""
    random = np.random.default_rng(layer)
    x = random.standard_normal((tokens, hidden)).astype(np.float32)
    gates = random.standard_normal((neurons, rank)) @ random.standard_normal((rank, hidden))
    return LayerExamples.of(layer, x, x @ gates.T > np.sqrt(rank * hidden))


def trained(
    examples: dict[int, LayerExamples], most_bytes: float, recipe: TrainingRecipe
) -> dict[int, TrainedPredictor]:
    """Return predictors trained on the first six sevenths of the examples, and selected on the last."""
    seen = {at: len(one) * 6 // 7 for at, one in examples.items()}
    learned = {at: one.part(0, seen[at]) for at, one in examples.items()}
    validation = {at: one.part(seen[at], len(one)) for at, one in examples.items()}
    return train_predictors(learned, validation, most_bytes, recipe)


def test_a_layer_that_is_hard_to_predict_gets_wider() -> None:
    found = trained({0: made(0, 4), 1: made(1, 40)}, 1e6, replace(RECIPE, chosen=1.4, steps=200))
    easy, hard = found[0], found[1]
    assert easy.predictor.rank == 32 < hard.predictor.rank
    assert easy.chosen <= 1.4
    assert min(easy.recall, hard.recall) >= RECIPE.recall


def test_a_layer_that_width_does_not_help_stays_narrow() -> None:
    noise = LayerExamples.of(0, made(0, 4).rows(slice(None))[0], np.random.default_rng(5).random((2000, 96)) < 0.2)
    found = trained({0: noise, 1: made(1, 40)}, 1e6, replace(RECIPE, chosen=1.4, steps=200))
    assert found[0].predictor.rank == 32 < found[1].predictor.rank


def test_they_never_take_more_than_they_may() -> None:
    layers = {0: made(0, 40), 1: made(1, 40)}
    narrow = trained(layers, 1e6, replace(RECIPE, chosen=1e9, steps=1))
    taken = sum(one.predictor.nbytes for one in narrow.values())
    limit = taken * 1.6
    grown = trained(layers, limit, replace(RECIPE, chosen=1.0, steps=1))
    assert taken < sum(one.predictor.nbytes for one in grown.values()) <= limit
    with pytest.raises(ModelError, match="narrowest predictors take"):
        trained(layers, taken - 1, replace(RECIPE, steps=1))


def test_a_seed_decides_what_is_trained(tmp_path: Path) -> None:
    def kept(seed: int, name: str) -> bytes:
        found = trained({0: made(0, 8)}, 1e6, replace(RECIPE, seed=seed, steps=20, chosen=1e9))
        save_predictors(tmp_path / name, [one.predictor for one in found.values()])
        return (tmp_path / name).read_bytes()

    assert kept(1, "a") == kept(1, "b") != kept(2, "c")


def test_predictors_look_ahead_where_that_costs_little() -> None:
    own, noise = made(1, 4), np.random.default_rng(3).standard_normal((2000, 64)).astype(np.float32)
    x, active = own.rows(slice(None))
    nearly = LayerExamples.of(1, x + 0.01 * noise, active, ahead=1)  # the layer before changes little
    unlike = LayerExamples.of(1, noise, active, ahead=1)
    for earlier, ahead in ((nearly, 1), (unlike, 0)):
        both = (earlier.part(0, 1714), earlier.part(1714, 2000))
        parts = ({1: own.part(0, 1714)}, {1: own.part(1714, 2000)})
        found = train_predictors(*parts, 1e6, replace(RECIPE, steps=200, chosen=1e9), None, {1: both})[1]
        assert found.predictor.ahead == ahead
        assert found.recall >= RECIPE.recall


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="too few"):
        trained({0: made(0, 4, tokens=2)}, 1e6, RECIPE)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("trained")
    pack_model(open_source(write_trained(folder / "model")), "f32", folder / "pack")
    return Pack.open(folder / "pack")


@pytest.fixture(scope="module")
def tokens(pack: Pack) -> I32:
    return cut_sequences(Tokenizer.load(pack).encode(TEXT.read_text()), 128, 96)


def test_the_trained_models_neurons_are_predicted(pack: Pack, tokens: I32, tmp_path: Path) -> None:
    """95% of the active neurons with at most 1.5 times as many chosen, in 6% of the bytes, at 1% of perplexity; on text
    of the same document that they did not learn from."""
    examples, seen = examples_of(pack, tokens, open_kernels()), tokens.size * 7 // 8
    recipe = TrainingRecipe(rank=96, steps=150, tokens=128, rate=6e-3, margin=0.01)
    found = trained({at: one.part(0, seen) for at, one in examples.items()}, LIMIT * pack.weight_bytes, recipe)
    save_predictors(tmp_path / "predictors", [one.predictor for one in found.values()], "trained")
    kept = load_predictors(tmp_path / "predictors")
    held = {at: one.part(seen, len(one)) for at, one in examples.items()}
    counts = np.array([one.rows(slice(None))[1].sum() for one in held.values()])
    figures = np.array([measure_predictor(kept[at], one) for at, one in held.items()])
    recall, chosen = counts @ figures / counts.sum()
    assert recall >= 0.95
    assert figures[:, 0].min() > 0.93
    assert chosen <= 1.5
    assert sum(one.nbytes for one in kept.values()) <= LIMIT * pack.weight_bytes
    unseen, kernels = tokens[-len(tokens) // 8 :], open_kernels()
    assert perplexity(pack, unseen, kernels, predicted_only(kept)) < 1.01 * perplexity(pack, unseen, kernels)


def test_a_lookahead_predictor_beats_frequencies(pack: Pack, tokens: I32) -> None:
    one = examples_of(pack, tokens, open_kernels(), ahead=1)[2]
    seen = tokens.size * 7 // 8
    recipe = TrainingRecipe(rank=32, steps=60, tokens=128, rate=6e-3, chosen=1e9)
    found = trained({2: one.part(0, seen)}, 1e9, recipe)[2].predictor
    held = one.part(seen, len(one))
    recall, factor = measure_predictor(found, held)
    before, active = (each.rows(slice(None))[1] for each in (one.part(0, seen), held))
    taken = np.argsort(-before.mean(axis=0))[: round(factor * active.sum(axis=1).mean())]
    assert found.ahead == 1
    assert recall > active[:, taken].sum() / active.sum() + 0.02
