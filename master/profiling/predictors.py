"""Predictors trained from a text, and kept beside the pack."""

from typing import Any

from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.progress import Progress
from tpi.sparsity.examples import examples_of
from tpi.sparsity.files import NAME, save_predictors
from tpi.sparsity.replay import I32
from tpi.sparsity.training import TrainedPredictor, TrainingRecipe, train_predictors

LIMIT = 0.06  # of the pack's bytes
TOKENS = 16_384  # of the text, at most: inputs and activity of all layers are in memory
STEPS = 3000  # of Adam: after 800 a tenth more neurons are named for the same recall


def train_beside(pack: Pack, tokens: I32, kernels: Kernels, ahead: int, progress: Progress) -> dict[str, Any]:
    """Train a predictor for each layer of `pack` on `tokens` `[sequences, length]`, and say what they are.

    Raises:
        ModelError: if activations of the model are never 0, or the look-ahead is no layer.
        WeightsError: if they cannot be kept.
    """
    if not 0 <= ahead < pack.config.layers:
        raise ModelError(f"--ahead {ahead} is beyond this model's {pack.config.layers} layers; give a smaller one")
    examples = examples_of(pack, tokens[: max(1, TOKENS // tokens.shape[1])], kernels, ahead)
    layers = set(examples)

    def report(one: TrainedPredictor) -> None:
        layers.discard(one.predictor.layer)
        progress(len(examples) - len(layers), len(examples))

    trained = train_predictors(examples, LIMIT * pack.weight_bytes, TrainingRecipe(steps=STEPS), report)
    save_predictors(pack.path / NAME, [one.predictor for one in trained.values()], "trained")
    return {
        "ahead": ahead,
        "share": sum(one.predictor.nbytes for one in trained.values()) / pack.weight_bytes,
        "layers": [
            {"rank": one.predictor.rank, "recall": one.recall, "chosen": one.chosen} for one in trained.values()
        ],
    }
