"""The training of predictors from a text; they are stored next to the pack."""

from shutil import disk_usage
from typing import Any

from master.profiling.measure import text_id
from scheduler.free import default_budget
from tpi.errors import ModelError, WeightsError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.progress import phase
from tpi.sparsity.examples import ExampleFiles, LayerExamples, token_bytes
from tpi.sparsity.files import NAME, save_predictors
from tpi.sparsity.replay import I32
from tpi.sparsity.training import TrainedPredictor, TrainingRecipe, measure_predictor, train_predictors, training_bytes

LIMIT = 0.06  # limit of the predictors' size, as a part of the pack's bytes
TOKENS = 65_536  # limit of the tokens that are used
EXAMPLES = "examples"  # name of the examples in the pack's directory, which are removed after training
STEPS = 3000  # steps of Adam; with 800 steps, a predictor chooses a tenth more neurons for the same recall
# parts of the tokens for learning and for validation, in this order; the rest is for measuring
LEARNED, VALIDATED = 0.75, 0.15
_MIB = 1 << 20

Parts = tuple[dict[int, LayerExamples], dict[int, LayerExamples], dict[int, LayerExamples]]


def train_beside(pack: Pack, tokens: I32, kernels: Kernels) -> dict[str, Any]:
    """Train a predictor for each layer of `pack` on `tokens` `[sequences, length]`; return their figures.

    Predictors learn from the beginning of the text, are selected on the next part, and measured on its end. Those of
    layers whose neurons are nearly as predictable one layer earlier look one layer ahead.

    Raises:
        ModelError: if activations of the model are never 0, or memory is too small.
        WeightsError: if examples or predictors cannot be stored.
    """
    tokens = tokens[: max(1, TOKENS // tokens.shape[1])]
    files = ExampleFiles(pack.path / EXAMPLES, text_id(pack, tokens))
    _check_memory(pack)
    _check_disk(pack, tokens, files)
    with phase(f"collecting training examples from {pack.path.name}") as progress:
        own = parted(files.collect(pack, tokens, kernels, progress=progress))
    earlier = parted(files.collect(pack, tokens, kernels, ahead=1))
    trained = _train(pack, own, earlier)
    save_predictors(pack.path / NAME, [one.predictor for one in trained.values()], "trained")
    unseen = (own[2], earlier[2])
    figures = [_figures(one, unseen[one.predictor.ahead][layer]) for layer, one in trained.items()]
    files.remove()
    taken, aim = sum(one.predictor.nbytes for one in trained.values()), TrainingRecipe.recall
    short = [at for at, one in enumerate(figures) if one["recall"] < aim]
    return {"share": taken / pack.weight_bytes, "layers": figures, "aim": aim, "short": short}


def parted(examples: dict[int, LayerExamples]) -> Parts:
    """Return the examples for learning, for choosing thresholds and widths, and for measuring, each by layer."""
    parts: Parts = ({}, {}, {})
    for layer, one in examples.items():
        first, second = round(LEARNED * len(one)), round((LEARNED + VALIDATED) * len(one))
        for part, (begin, end) in zip(parts, ((0, first), (first, second), (second, len(one))), strict=True):
            part[layer] = one.part(begin, end)
    return parts


def _train(pack: Pack, own: Parts, earlier: Parts) -> dict[int, TrainedPredictor]:
    (learned, validation, _), layers = own, set(own[0])
    before = {layer: (earlier[0][layer], earlier[1][layer]) for layer in layers if earlier[0][layer].ahead}
    with phase(f"training predictors for {pack.path.name}") as progress:

        def report(one: TrainedPredictor) -> None:
            layers.discard(one.predictor.layer)
            progress(len(learned) - len(layers), len(learned))

        recipe = TrainingRecipe(steps=STEPS)
        return train_predictors(learned, validation, LIMIT * pack.weight_bytes, recipe, report, before)


def _figures(one: TrainedPredictor, unseen: LayerExamples) -> dict[str, Any]:
    recall, chosen = measure_predictor(one.predictor, unseen)
    return {"ahead": one.predictor.ahead, "rank": one.predictor.rank, "recall": recall, "chosen": chosen}


def _check_memory(pack: Pack) -> None:
    config = pack.config
    needed = training_bytes(config.hidden, config.intermediate, LIMIT * pack.weight_bytes, config.layers)
    if needed > (free := default_budget()):
        raise ModelError(
            f"training predictors for {pack.path.name} takes {needed // _MIB} MiB of memory, and {free // _MIB} are "
            "free; end other programs, or profile the model on a larger machine"
        )


def _check_disk(pack: Pack, tokens: I32, files: ExampleFiles) -> None:
    """Check that the disk has room for the examples; examples that were collected before take no further room.

    Raises:
        WeightsError: if the disk is too full.
    """
    free = disk_usage(pack.path).free + files.nbytes
    if (needed := tokens.size * token_bytes(pack)) > free:
        raise WeightsError(
            f"the training examples for {pack.path.name} take {needed // _MIB} MiB of disk until it is done, and "
            f"{free // _MIB} are free; free some, or give --tokens {max(1, free // token_bytes(pack))}"
        )
