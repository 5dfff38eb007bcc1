"""The placement with the most impact on the accelerator: PowerInfer's equations 2 to 8, solved by HiGHS.

The unknowns are 0 or 1: one for each batch (`a`), one for each layer's predictor, and one for each layer (`y`: it has
neurons on the accelerator). A neuron that is not on the accelerator is on the CPU, which is equation 3.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.model.highs import solve_milp
from scheduler.model.neurons.problem import F64, I32, NeuronProblem
from tpi.errors import PlanError

I64 = npt.NDArray[np.int64]
SECONDS = 30.0  # seconds after which the best placement found so far is taken
GAP = 1e-4  # the impact may be below the best possible one by this share: proving more can take minutes


@dataclass(frozen=True, eq=False)
class NeuronPlacement:
    """The accelerator's part of a model.

    Attributes:
        neurons: the neurons of each layer that are on the accelerator, in order.
        predictors: whether each layer's predictor is on the accelerator.
        impact: the total impact of both.
    """

    neurons: tuple[I32, ...]
    predictors: tuple[bool, ...]
    impact: float

    def nbytes(self, problem: NeuronProblem) -> int:
        """Return the number of bytes of the accelerator's memory that the placement takes."""
        return sum(
            len(chosen) * layer.neuron_bytes + kept * layer.predictor_bytes
            for chosen, kept, layer in zip(self.neurons, self.predictors, problem.layers, strict=True)
        )


@dataclass(frozen=True, eq=False)
class _Columns:
    """The unknowns of the program: batches of all layers, then predictors, then layers.

    `layer` is the layer of each batch, and `count` the number of its neurons. `impact` and `nbytes` are those of each
    batch and then of each predictor.
    """

    layer: I64
    count: I64
    impact: F64  # impact of each batch, then of each predictor
    nbytes: I64  # bytes of each batch, then of each predictor

    @classmethod
    def of(cls, problem: NeuronProblem) -> "_Columns":
        layer = np.concatenate([np.full(len(one.batches), at) for at, one in enumerate(problem.layers)])
        count = np.array([len(batch) for one in problem.layers for batch in one.batches])
        sizes = np.array([one.neuron_bytes for one in problem.layers])
        impact = np.concatenate([*(one.impacts for one in problem.layers), _predictor_impacts(problem)])
        nbytes = np.concatenate([count * sizes[layer], [one.predictor_bytes for one in problem.layers]])
        return cls(layer, count, impact, nbytes.astype(np.int64))


def place_neurons(problem: NeuronProblem, seconds: float = SECONDS, gap: float = GAP) -> NeuronPlacement:
    """Return the neurons and predictors to place on the accelerator, chosen for the greatest total impact.

    The impact of a batch of neurons is the mean number of its neurons that are active for a token. The impact of a
    predictor is the number of neurons that take as many bytes.

    Args:
        problem: the layers, and the memory of the accelerator and of the CPU.
        seconds: the time limit; when it is reached, the best placement so far is returned.
        gap: the search may stop when it has proved that no placement has more impact by this share, 0 to 1.

    Raises:
        PlanError: if the two memories do not hold the model.
    """
    from scipy.optimize import Bounds

    columns = _Columns.of(problem)
    objective = np.concatenate([-columns.impact, np.zeros(len(problem.layers))])
    upper = np.ones(len(objective))
    upper[len(columns.impact) :] = [least is not None for least in problem.least]
    found = solve_milp(
        objective, integrality=np.ones(len(objective)), bounds=Bounds(0, upper),
        constraints=[_memory(problem, columns), *_layers(problem, columns)],
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )  # fmt: skip
    if found.x is None:
        raise PlanError(
            f"{int(columns.nbytes.sum())} bytes of neurons and predictors do not fit into "
            f"{problem.accelerator.capacity} bytes on the accelerator and {problem.cpu.capacity} bytes on the CPU; "
            "give more --memory or --gpu-memory, or use a smaller --dtype"
        )
    return _placement(problem, columns, np.round(found.x).astype(bool))


def _predictor_impacts(problem: NeuronProblem) -> list[float]:
    return [one.predictor_impact for one in problem.layers]


def _memory(problem: NeuronProblem, columns: _Columns) -> object:
    """Return the constraint on memory: weights on the accelerator fit into its memory, the others into the CPU's.

    This is inequality 6 for both units.
    """
    from scipy.optimize import LinearConstraint

    total, unit = int(columns.nbytes.sum()), float(columns.nbytes.max())
    row = np.concatenate([columns.nbytes, np.zeros(len(problem.layers))]) / unit
    return LinearConstraint(row[None], (total - problem.cpu.capacity) / unit, problem.accelerator.capacity / unit)


def _layers(problem: NeuronProblem, columns: _Columns) -> list[object]:
    """Return inequalities 7 and 8 for all layers, and one more: a predictor may be on the accelerator only with
    neurons.

    `K` of the paper is the number of the layer's neurons, the smallest number that excludes no valid placement.
    """
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_array, eye_array, hstack

    layers, batches = len(problem.layers), len(columns.layer)
    members = coo_array((columns.count, (columns.layer, np.arange(batches))), shape=(layers, batches))
    least = np.array([one or 0 for one in problem.least], float)
    most = np.array([len(one.frequency) for one in problem.layers], float)
    one, nothing = eye_array(layers), coo_array((layers, layers))
    return [
        LinearConstraint(hstack([members, nothing, one * -least], format="csr"), 0, np.inf),
        LinearConstraint(hstack([members, nothing, one * -most], format="csr"), -np.inf, 0),
        LinearConstraint(hstack([coo_array((layers, batches)), one, -one], format="csr"), -np.inf, 0),
    ]


def _placement(problem: NeuronProblem, columns: _Columns, chosen: npt.NDArray[np.bool_]) -> NeuronPlacement:
    batches = len(columns.layer)
    neurons = []
    for at, layer in enumerate(problem.layers):
        marks = chosen[:batches][columns.layer == at]
        taken = [batch for batch, mark in zip(layer.batches, marks, strict=True) if mark]
        neurons.append(np.sort(np.concatenate([np.empty(0, np.int32), *taken])).astype(np.int32))
    kept = chosen[batches : batches + len(problem.layers)]
    return NeuronPlacement(
        tuple(neurons), tuple(kept.tolist()), float(columns.impact[chosen[: len(columns.impact)]].sum())
    )
