"""Training of predictors: two small matrices a layer, as wide as the layer needs (PowerInfer, section 5.1).

All layers begin narrow. The layer that chooses the most neurons for its recall grows, again and again, until none
chooses too many, width no longer helps, or the bytes are spent: layers that are sparse, or whose activity is skewed,
stay narrow. A predictor begins as the best linear one of its rank (reduced-rank regression of activity on input), each
direction with both its signs, since ReLU keeps one; Adam then minimises the cross-entropy. Where 4 bits are kept,
the last steps see the matrices as they will be kept.

Thresholds and widths are chosen on tokens that training does not see. What is measured there flatters both, so that who
wants to know how good they are measures them on a third text. A seed decides everything that is random.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tpi.errors import ModelError
from tpi.pack.groups import dequantise_groups, quantise_groups
from tpi.pack.layout import GROUP
from tpi.sparsity.descent import Adam, initial
from tpi.sparsity.examples import ROWS, Active, LayerExamples
from tpi.sparsity.predictor import F32, Predictor, PredictorMatrix, Weights, row_bytes

_GAIN = 0.96  # of the neurons chosen, that a step of width must leave at most
_PARAMETER = 32  # bytes in memory of each weight while it is trained: its gradient, moments, and itself as it is kept
_AGAIN = 8  # steps after which the error of 4 bits is computed again, which takes as long as some
_TOKEN = 16  # and of each neuron for each token that is unpacked


@dataclass(frozen=True)
class TrainingRecipe:
    """How predictors are trained.

    Attributes:
        recall: share of the active neurons that is to be chosen.
        chosen: neurons chosen for each that is active, at most.
        rank: of the narrowest predictors, and by how much they grow; blocks need multiples of 32.
        rounded: share of the steps, the last ones, that see the matrices as 4 bits keep them.
        margin: recall above `recall` that is sought on the validation text, as other text differs.
    """

    recall: float = 0.95
    chosen: float = 1.5
    rank: int = 32
    weights: Weights = "q4s"
    steps: int = 400
    tokens: int = 256  # of a step
    rate: float = 3e-3
    rounded: float = 0.35
    margin: float = 0.005
    seed: int = 0


@dataclass(frozen=True, eq=False)
class TrainedPredictor:
    """A predictor with its recall, and the neurons it chooses for each active one, on the validation text."""

    predictor: Predictor
    recall: float
    chosen: float


def train_predictors(
    learned: Mapping[int, LayerExamples],
    validation: Mapping[int, LayerExamples],
    most_bytes: float,
    recipe: TrainingRecipe | None = None,
    report: Callable[[TrainedPredictor], None] | None = None,
) -> dict[int, TrainedPredictor]:
    """Predictors of all layers that together take `most_bytes` at most, from examples by layer.

    They learn from the first, their thresholds and widths are chosen on the second. `report` is told of each that was
    trained, the ones that are replaced later among them.

    Raises:
        ModelError: if not even the narrowest fit, or there are too few tokens to learn from.
    """
    recipe = recipe or TrainingRecipe()
    found: dict[int, TrainedPredictor] = {}
    for layer, one in learned.items():
        found[layer] = _trained(one, validation[layer], recipe.rank, recipe, report)
    if (taken := _nbytes(found)) > most_bytes:
        raise ModelError(f"the narrowest predictors take {taken} bytes, more than {most_bytes:.0f}; use more of them")
    growing = set(found)
    while growing and found[worst := max(growing, key=lambda layer: found[layer].chosen)].chosen > recipe.chosen:
        rank = found[worst].predictor.rank + recipe.rank
        if rank > 2 * learned[worst].hidden or _nbytes(found) + _growth(found[worst], recipe) > most_bytes:
            growing.remove(worst)
            continue
        wider = _trained(learned[worst], validation[worst], rank, recipe, report)
        if wider.chosen > _GAIN * found[worst].chosen:  # bytes do not help it, and may help others
            growing.remove(worst)
        else:
            found[worst] = wider
    return found


def measured(predictor: Predictor, examples: LayerExamples) -> tuple[float, float]:
    """Recall of a predictor, and neurons chosen for each active one."""
    hit = chosen = total = 0
    for x, active in examples.pieces():
        named = predictor.active(x)
        hit += int((named & active).sum())
        chosen += int(named.sum())
        total += int(active.sum())
    return hit / max(total, 1), chosen / max(total, 1)


def training_bytes(hidden: int, neurons: int, most_bytes: float, layers: int) -> int:
    """About what training takes in memory: the sums that it begins with, a piece of the text, and the weights of a
    layer with twice its part of `most_bytes`."""
    weights = 2 * most_bytes / layers / row_bytes(GROUP, "q4s") * GROUP
    sums = 6 * 8 * hidden**2 + 4 * hidden * neurons
    return round(sums + ROWS * (8 * hidden + _TOKEN * neurons) + _PARAMETER * weights)


def _threshold(plain: Predictor, examples: LayerExamples, recall: float) -> float:
    """The highest threshold at which `recall` of the active neurons are chosen; above all scores if none is active."""
    wanted, most = [np.zeros(0, np.float32)], 0.0
    for x, active in examples.pieces():
        scores = plain.scores(x)
        most = max(most, float(scores.max()))
        wanted.append(scores[active])
    ordered = np.sort(np.concatenate(wanted))
    return float(ordered[int((1 - recall) * len(ordered))]) if len(ordered) else most + 1


def _nbytes(found: Mapping[int, TrainedPredictor]) -> int:
    return sum(one.predictor.nbytes for one in found.values())


def _growth(one: TrainedPredictor, recipe: TrainingRecipe) -> float:
    """Bytes that one step of width takes."""
    matrices = one.predictor.first.stored.nbytes + one.predictor.second.stored.nbytes
    return matrices / one.predictor.rank * recipe.rank


def _trained(
    learned: LayerExamples, validation: LayerExamples, rank: int, recipe: TrainingRecipe,
    report: Callable[[TrainedPredictor], None] | None,
) -> TrainedPredictor:  # fmt: skip
    if len(learned) < 2 or not len(validation):
        few = len(learned) + len(validation)
        raise ModelError(f"{few} tokens are too few to train a predictor; profile the model with a longer text")
    first, second, bias = _fitted(learned, rank, recipe)
    matrices = (PredictorMatrix.of(first, recipe.weights), PredictorMatrix.of(second, recipe.weights))
    plain = Predictor(learned.layer, *matrices, ahead=learned.ahead, bias=bias)
    threshold = _threshold(plain, validation, min(recipe.recall + recipe.margin, 1))
    predictor = replace(plain, threshold=threshold)
    made = TrainedPredictor(predictor, *measured(predictor, validation))
    if report:
        report(made)
    return made


def _fitted(examples: LayerExamples, rank: int, recipe: TrainingRecipe) -> tuple[F32, F32, F32]:
    """`first`, `second` and bias after `recipe.steps` steps of Adam, whose rate falls evenly."""
    random = np.random.default_rng([recipe.seed, rank])
    first, second, bias = values = initial(examples, rank, random)
    adam, errors = Adam(values), (np.float32(0), np.float32(0))
    rounded = recipe.steps * (1 - recipe.rounded) if recipe.weights == "q4s" else recipe.steps
    for step in range(recipe.steps):
        if step >= rounded and step % _AGAIN == 0:
            errors = (_error(first), _error(second))
        batch = examples.rows(random.integers(0, len(examples), recipe.tokens))
        gradients = _gradients(first + errors[0], second + errors[1], bias, *batch)
        adam.step(gradients, recipe.rate * (1 - step / recipe.steps))
    return values


def _error(values: F32) -> F32:
    """What 4 bits add to `[rows, columns]`."""
    return dequantise_groups("q4s", quantise_groups("q4s", values)) - values


def _gradients(first: F32, second: F32, bias: F32, x: F32, active: Active) -> tuple[F32, F32, F32]:
    """Of the mean cross-entropy, by `first`, `second` and bias."""
    between = np.maximum(x @ first.T, 0)
    scores = np.clip(between @ second.T + bias, -30, 30)
    error = (1 / (1 + np.exp(-scores)) - active) / np.float32(active.size)
    back = np.where(between > 0, error @ second, 0)
    return back.T @ x, error.T @ between, error.sum(axis=0)
