"""Predictors that the master sends to a node: checks of the plan, and the predictors made from received blocks."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError, WeightsError
from tpi.net.messages import Assign, PredictorPlan
from tpi.pack.layout import GROUP
from tpi.partition import FFN_UNIT
from tpi.sparsity.predictor import Predictor, PredictorMatrix, Weights, row_bytes
from worker.node_plan import NodePlan
from worker.shards.image import HeldBlock

_MOST_RANK = 1 << 14
NAMED = 1.5  # limit of the neurons that a predictor names for each active one (tpi.sparsity.training)


def predictor_faults(assign: Assign) -> Iterator[str | None]:
    """Yield a message for each fault in a plan's predictors; the plan's blocks must be valid."""
    if len({one.layer for one in assign.predictors}) < len(assign.predictors):
        yield "a layer has two predictors"
    for one in assign.predictors:
        yield _fault(assign, one)


def predictors_of(plan: NodePlan, held: Sequence[HeldBlock]) -> dict[int, Predictor]:
    """Return the predictors of this node's neurons by layer; `held` are the plan's blocks in the plan's order.

    Raises:
        WeightsError: if a predictor cannot be used.
    """
    hidden = plan.config.hidden
    try:
        return {one.layer: _predictor(one, held[one.block].vectors, hidden) for one in plan.predictors}
    except ModelError as error:
        raise WeightsError(f"{error}; run `tpi profile --predictors` again") from error


def frequencies_of(plan: NodePlan, held: Sequence[HeldBlock]) -> dict[int, npt.NDArray[np.float64]]:
    """Return how often each of this node's neurons is active, by layer, float64 `[neurons]` from 0 to 1.

    If the model was not profiled, this estimates the frequency from the predictor's bias, if it has one. Neurons that
    PowerInfer's solver marked for a GPU then count as more frequent than all others.
    """
    found = {}
    for one in plan.predictors:
        vectors = held[one.block].vectors
        often = vectors.get("frequency")
        if often is None:
            bias = vectors.get("bias", np.zeros(one.neurons, np.float32))
            often = 0.5 * (1 + np.tanh(0.5 * (bias - np.float32(one.threshold))))
            often = 0.5 * (often + vectors["marked"]) if "marked" in vectors else often
        found[one.layer] = np.clip(np.nan_to_num(often.astype(np.float64)), 0.0, 1.0)
    return found


def matrix_bytes(rows: int, columns: int, weights: Weights) -> int:
    """Return the bytes of a predictor's matrix in its storage format."""
    return rows * row_bytes(columns, weights)


def values_of(nbytes: int) -> int:
    """Return the number of float32 values that `nbytes` bytes are packed into for sending."""
    return -(-nbytes // 4)


def _fault(assign: Assign, one: PredictorPlan) -> str | None:
    config, block = assign.config, assign.blocks[one.block]
    neurons = _neurons(assign, one.layer)
    if not (one.ahead <= one.layer < config.layers and 1 <= one.rank <= _MOST_RANK and np.isfinite(one.threshold)):
        return f"the predictor of layer {one.layer} has rank {one.rank}, and looks {one.ahead} layers ahead"
    if one.neurons != neurons:
        return f"the predictor of layer {one.layer} is made for {one.neurons} neurons, but the node has {neurons}"
    if one.weights != "f16" and (config.hidden % GROUP or one.rank % GROUP):
        return f"the predictor of layer {one.layer} has rows whose length is not a multiple of {GROUP}"
    shapes = {"first": (one.rank, config.hidden), "second": (one.neurons, one.rank)}
    sizes = {name: values_of(matrix_bytes(*shape, one.weights)) for name, shape in shapes.items()}
    sizes["bias"] = sizes["frequency"] = sizes["marked"] = one.neurons
    lengths = {vector.name: vector.length for vector in block.vectors}
    if block.runs or not {"first", "second"} <= lengths.keys() <= sizes.keys():
        return f"the predictor of layer {one.layer} is a block with missing or unknown parts"
    if any(length != sizes[name] for name, length in lengths.items()):
        return f"the predictor of layer {one.layer} has parts whose sizes do not match its rank"
    return None


def _neurons(assign: Assign, layer: int) -> int:
    """Return the number of this node's neurons in a layer's dense feed-forward block, without padding; -1 if none."""
    found = (one.blocks for one in assign.layers if one.number == layer)
    for block in (assign.blocks[index] for index in next(found, ())):
        if block.kind == "ffn":
            (run,) = block.runs
            bounds = (min(unit * FFN_UNIT, assign.config.intermediate) for unit in (run.first, run.last))
            first, last = bounds
            return last - first
    return -1


def _predictor(one: PredictorPlan, vectors: dict[str, npt.NDArray[np.float32]], hidden: int) -> Predictor:
    first = PredictorMatrix(_stored(vectors["first"], one.rank, hidden, one.weights), hidden)
    second = PredictorMatrix(_stored(vectors["second"], one.neurons, one.rank, one.weights), one.rank)
    return Predictor(one.layer, first, second, one.threshold, one.ahead, one.given, vectors.get("bias"))


def _stored(values: npt.NDArray[np.float32], rows: int, columns: int, weights: Weights) -> npt.NDArray[Any]:
    raw = values.view(np.uint8)[: matrix_bytes(rows, columns, weights)].reshape(rows, -1)
    return raw.view(np.float16) if weights == "f16" else raw
