"""Training of predictors: two small matrices for each layer, as wide as the layer needs (PowerInfer, section 5.1).

All predictors start with the smallest rank. The predictor that chooses the most neurons for each active one is then
made wider. This is repeated until none chooses too many, more width no longer helps, or the bytes are used up. Layers
that are sparse, or whose activity is skewed, stay narrow. A predictor is initialised by reduced-rank regression of the
activity on the input, each direction with both signs, since ReLU passes only one. Adam then minimises the
cross-entropy. For 4-bit matrices, the last steps see the quantised values.

A layer gets a predictor that looks one layer ahead, so that its neurons can be read or moved earlier (DynamicInfer,
design 1), if that predictor chooses hardly more neurons than one that sees the layer's own input.

Thresholds and widths are chosen on validation tokens that training does not see. Recall measured there is too
optimistic, so measure it on a third text. All randomness comes from one seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tpi.errors import ModelError
from tpi.pack.groups import dequantise_groups, quantise_groups
from tpi.pack.layout import GROUP
from tpi.sparsity.descent import Adam, initial_weights
from tpi.sparsity.examples import ROWS, Active, LayerExamples
from tpi.sparsity.predictor import F32, Predictor, PredictorMatrix, Weights, row_bytes

_GAIN = 0.96  # a wider predictor is used if it chooses at most this share of the neurons chosen before
_PARAMETER = 32  # bytes in memory for each weight in training: the weight, its gradient, moments and quantised copy
_AGAIN = 8  # steps between computations of the quantisation error, which takes as long as several steps
_TOKEN = 16  # bytes in memory for each neuron of each unpacked token


@dataclass(frozen=True)
class TrainingRecipe:
    """Settings of the training of predictors.

    Attributes:
        recall: share of the active neurons that must be chosen.
        chosen: most neurons chosen for each active one; a layer above it is widened.
        rank: smallest rank, and the step by which ranks grow; q8 and q4s need a multiple of 32.
        weights: format of the matrices.
        steps: steps of Adam for each predictor.
        tokens: tokens of one step.
        rate: learning rate of the first step; it falls linearly to 0.
        rounded: share of the steps, at the end, that see the matrices quantised to 4 bits.
        margin: recall to reach on the validation text in addition to `recall`, as other text differs.
        look: most neurons that a predictor with look-ahead may choose, as a multiple of what one without it chooses.
        seed: seed of all randomness.
    """

    recall: float = 0.95
    chosen: float = 1.5
    rank: int = 32
    weights: Weights = "q4s"
    steps: int = 400
    tokens: int = 256
    rate: float = 3e-3
    rounded: float = 0.35
    margin: float = 0.005
    look: float = 1.1
    seed: int = 0


@dataclass(frozen=True, eq=False)
class TrainedPredictor:
    """A predictor with its recall on the validation text, and the neurons chosen there for each active one."""

    predictor: Predictor
    recall: float
    chosen: float


def train_predictors(
    learned: Mapping[int, LayerExamples],
    validation: Mapping[int, LayerExamples],
    most_bytes: float,
    recipe: TrainingRecipe | None = None,
    report: Callable[[TrainedPredictor], None] | None = None,
    earlier: Mapping[int, tuple[LayerExamples, LayerExamples]] | None = None,
) -> dict[int, TrainedPredictor]:
    """Train predictors of all layers that together take at most `most_bytes`, and return them by layer.

    Weights are learned from the examples `learned`; thresholds and widths are chosen on `validation`. `report` is
    called with each trained predictor, including those that another one replaces later. Without `recipe`, the default
    settings are used. `earlier` has both kinds of examples with the inputs of an earlier layer, by layer; a layer's
    predictor looks ahead if `TrainingRecipe.look` allows it.

    Raises:
        ModelError: if even the narrowest predictors take more than `most_bytes`, or if there are too few tokens.
    """
    recipe = recipe or TrainingRecipe()
    examples = {layer: (one, validation[layer]) for layer, one in learned.items()}
    found = {layer: _trained(*both, recipe.rank, recipe, report) for layer, both in examples.items()}
    for layer, both in (earlier or {}).items():
        ahead = _trained(*both, recipe.rank, recipe, report)
        if ahead.chosen <= recipe.look * found[layer].chosen:
            found[layer], examples[layer] = ahead, both
    if (taken := _nbytes(found)) > most_bytes:
        raise ModelError(
            f"the narrowest predictors take {taken} bytes, more than {most_bytes:.0f}; leave --predictors out"
        )
    growing = set(found)
    while growing and found[worst := max(growing, key=lambda layer: found[layer].chosen)].chosen > recipe.chosen:
        rank = found[worst].predictor.rank + recipe.rank
        if rank > 2 * examples[worst][0].hidden or _nbytes(found) + _growth(found[worst], recipe) > most_bytes:
            growing.remove(worst)
            continue
        wider = _trained(*examples[worst], rank, recipe, report)
        if wider.chosen > _GAIN * found[worst].chosen:  # width does not help: leave the bytes to other layers
            growing.remove(worst)
        else:
            found[worst] = wider
    return found


def measure_predictor(predictor: Predictor, examples: LayerExamples) -> tuple[float, float]:
    """Return the recall of a predictor on `examples`, and the neurons that it chooses for each active one."""
    hit = chosen = total = 0
    for x, active in examples.pieces():
        named = predictor.active(x)
        hit += int((named & active).sum())
        chosen += int(named.sum())
        total += int(active.sum())
    return hit / max(total, 1), chosen / max(total, 1)


def training_bytes(hidden: int, neurons: int, most_bytes: float, layers: int) -> int:
    """Return an estimate of the bytes of memory that training takes.

    The estimate counts the moments of the initial regression, one piece of the text, and the weights of one layer. That
    layer is assumed to take twice its equal part of `most_bytes`.
    """
    weights = 2 * most_bytes / layers / row_bytes(GROUP, "q4s") * GROUP
    sums = 6 * 8 * hidden**2 + 4 * hidden * neurons
    return round(sums + ROWS * (8 * hidden + _TOKEN * neurons) + _PARAMETER * weights)


def _threshold(plain: Predictor, examples: LayerExamples, recall: float) -> float:
    """Return the highest threshold at which `plain` finds at least the share `recall` of the active neurons.

    If no neuron of `examples` is active, the threshold is above all scores.
    """
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
    """Return the number of bytes that the matrices of a predictor grow by if its width grows by one step."""
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
    made = TrainedPredictor(predictor, *measure_predictor(predictor, validation))
    if report:
        report(made)
    return made


def _fitted(examples: LayerExamples, rank: int, recipe: TrainingRecipe) -> tuple[F32, F32, F32]:
    """Return the matrices `first` and `second` and the bias after `recipe.steps` steps of Adam.

    The learning rate falls linearly to 0.
    """
    random = np.random.default_rng([recipe.seed, rank])
    first, second, bias = values = initial_weights(examples, rank, random)
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
    """Return the error that 4-bit quantisation makes in each of `values`, `[rows, columns]`."""
    return dequantise_groups("q4s", quantise_groups("q4s", values)) - values


def _gradients(first: F32, second: F32, bias: F32, x: F32, active: Active) -> tuple[F32, F32, F32]:
    """Return the gradients of the mean cross-entropy with respect to `first`, `second` and `bias`."""
    between = np.maximum(x @ first.T, 0)
    scores = np.clip(between @ second.T + bias, -30, 30)
    error = (1 / (1 + np.exp(-scores)) - active) / np.float32(active.size)
    back = np.where(between > 0, error @ second, 0)
    return back.T @ x, error.T @ between, error.sum(axis=0)
