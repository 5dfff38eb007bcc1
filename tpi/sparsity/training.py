"""Training of predictors: two small matrices a layer, as wide as the layer needs (PowerInfer, section 5.1).

All layers begin narrow. The layer that chooses the most neurons for its recall grows, again and again, until none
chooses too many, width no longer helps, or the bytes are spent: layers that are sparse, or whose activity is skewed,
stay narrow. A predictor begins as the best linear one of its rank (reduced-rank regression of activity on input), each
direction with both its signs, since ReLU keeps one; Adam then minimises the cross-entropy. What is measured is measured
with the matrices as they are kept, on tokens that training does not see. A seed decides everything that is random.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sparsity.descent import Adam, initial
from tpi.sparsity.predictor import Predictor, PredictorMatrix, Weights

F32 = npt.NDArray[np.float32]
Active = npt.NDArray[np.bool_]
_GAIN = 0.96  # of the neurons chosen, that a step of width must leave at most


@dataclass(frozen=True)
class TrainingRecipe:
    """How predictors are trained.

    Attributes:
        recall: share of the active neurons that is to be chosen.
        chosen: neurons chosen for each that is active, at most.
        rank: of the narrowest predictors, and by how much they grow; q8 needs multiples of 32.
        margin: recall above `recall` that is sought where it is measured, as other text differs.
        held: share of the tokens, the last ones, that are for measuring.
    """

    recall: float = 0.95
    chosen: float = 1.5
    rank: int = 32
    weights: Weights = "q8"
    steps: int = 400
    tokens: int = 256  # of a step
    rate: float = 3e-3
    margin: float = 0.005
    held: float = 0.15
    seed: int = 0


@dataclass(frozen=True, eq=False)
class LayerExamples:
    """What a predictor of `layer` learns from: its input `[tokens, hidden]`, which is that of `ahead` layers before,
    and which neurons are active `[tokens, neurons]`."""

    layer: int
    x: F32
    active: Active
    ahead: int = 0


@dataclass(frozen=True, eq=False)
class TrainedPredictor:
    """A predictor with its recall, and the neurons it chooses for each active one, on tokens held out."""

    predictor: Predictor
    recall: float
    chosen: float


def train_predictors(
    examples: Mapping[int, LayerExamples],
    most_bytes: float,
    recipe: TrainingRecipe | None = None,
    report: Callable[[TrainedPredictor], None] | None = None,
) -> dict[int, TrainedPredictor]:
    """Predictors of all layers that together take `most_bytes` at most.

    `report` is told of each that was trained, the ones that are replaced later among them.

    Raises:
        ModelError: if not even the narrowest fit, or there are too few tokens to learn from.
    """
    recipe = recipe or TrainingRecipe()
    found: dict[int, TrainedPredictor] = {}
    for layer, one in examples.items():
        found[layer] = _trained(one, recipe.rank, recipe, report)
    if (taken := _nbytes(found)) > most_bytes:
        raise ModelError(f"the narrowest predictors take {taken} bytes, more than {most_bytes:.0f}; use more of them")
    growing = set(found)
    while growing and found[worst := max(growing, key=lambda layer: found[layer].chosen)].chosen > recipe.chosen:
        rank = found[worst].predictor.rank + recipe.rank
        if rank > 2 * examples[worst].x.shape[1] or _nbytes(found) + _growth(found[worst], recipe) > most_bytes:
            growing.remove(worst)
            continue
        wider = _trained(examples[worst], rank, recipe, report)
        if wider.chosen > _GAIN * found[worst].chosen:  # bytes do not help it, and may help others
            growing.remove(worst)
        else:
            found[worst] = wider
    return found


def measured(predictor: Predictor, x: F32, active: Active) -> tuple[float, float]:
    """Recall of a predictor, and neurons chosen for each active one."""
    chosen, total = predictor.active(x), max(int(active.sum()), 1)
    return float((chosen & active).sum() / total), float(chosen.sum() / total)


def threshold_for(scores: F32, active: Active, recall: float) -> float:
    """The highest threshold at which `recall` of the active neurons are chosen; infinite scores never are."""
    wanted = np.sort(scores[active])
    return float(wanted[int((1 - recall) * len(wanted))]) if len(wanted) else float(np.max(scores)) + 1


def _nbytes(found: Mapping[int, TrainedPredictor]) -> int:
    return sum(one.predictor.nbytes for one in found.values())


def _growth(one: TrainedPredictor, recipe: TrainingRecipe) -> float:
    """Bytes that one step of width takes."""
    matrices = one.predictor.first.stored.nbytes + one.predictor.second.stored.nbytes
    return matrices / one.predictor.rank * recipe.rank


def _trained(
    one: LayerExamples, rank: int, recipe: TrainingRecipe, report: Callable[[TrainedPredictor], None] | None
) -> TrainedPredictor:
    seen = round(len(one.x) * (1 - recipe.held))
    if not 1 < seen < len(one.x):
        raise ModelError(f"{len(one.x)} tokens are too few to train a predictor; profile the model with a longer text")
    first, second, bias = _fitted(one.x[:seen], one.active[:seen], rank, recipe)
    matrices = (PredictorMatrix.of(first, recipe.weights), PredictorMatrix.of(second, recipe.weights))
    plain = Predictor(one.layer, *matrices, ahead=one.ahead, bias=bias)
    x, active = one.x[seen:], one.active[seen:]
    threshold = threshold_for(plain.scores(x), active, min(recipe.recall + recipe.margin, 1))
    predictor = Predictor(one.layer, *matrices, threshold, one.ahead, bias=bias)
    made = TrainedPredictor(predictor, *measured(predictor, x, active))
    if report:
        report(made)
    return made


def _fitted(x: F32, active: Active, rank: int, recipe: TrainingRecipe) -> tuple[F32, F32, F32]:
    """`first`, `second` and bias after `recipe.steps` steps of Adam, whose rate falls evenly."""
    random = np.random.default_rng([recipe.seed, rank])
    values = initial(x, active, rank, random)
    adam = Adam(values)
    for step in range(recipe.steps):
        at = random.integers(0, len(x), recipe.tokens)
        adam.step(_gradients(*values, x[at], active[at]), recipe.rate * (1 - step / recipe.steps))
    return values


def _gradients(first: F32, second: F32, bias: F32, x: F32, active: Active) -> tuple[F32, F32, F32]:
    """Of the mean cross-entropy, by `first`, `second` and bias."""
    between = np.maximum(x @ first.T, 0)
    scores = np.clip(between @ second.T + bias, -30, 30)
    error = (1 / (1 + np.exp(-scores)) - active) / np.float32(active.size)
    back = np.where(between > 0, error @ second, 0)
    return back.T @ x, error.T @ between, error.sum(axis=0)
