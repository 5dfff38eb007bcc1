"""Predictors in the form of trained ones that are always right: they name the active neurons, or all neurons."""

from collections.abc import Mapping

import numpy as np

from tpi.kernels import open_kernels
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Predictor, PredictorMatrix
from tpi.sparsity.replay import F32, FeedForward, FfnWeights, read_ffn

LEAST = 1e-30  # a score


def exact_predictors(pack: Pack) -> dict[int, Predictor]:
    """Return predictors that score each neuron with its own gate, as the difference of ReLU(w x) and ReLU(-w x)."""
    return {layer: _predictor(layer, gate, LEAST) for layer, gate in _gates(pack).items()}


def all_predictors(pack: Pack, ahead: int = 0) -> dict[int, Predictor]:
    """Return predictors that name every neuron, `ahead` layers ahead (in the first layers, as far as possible)."""
    return {layer: _predictor(layer, gate, -1e30, min(layer, ahead)) for layer, gate in _gates(pack).items()}


def predicted_only(predictors: Mapping[int, Predictor]) -> FeedForward:
    """Return a feed-forward function that computes only the predicted neurons; the others count as 0."""

    def compute(layer: int, weights: FfnWeights, x: F32) -> F32:
        inner = np.where(predictors[layer].active(x), weights.inner(x), np.float32(0))
        return np.asarray(inner @ weights.down, np.float32)

    return compute


def _gates(pack: Pack) -> dict[int, F32]:
    kernels, found = open_kernels(), {}
    for layer, blocks in enumerate(pack.layers):
        weights = read_ffn(pack.config, blocks[-1], kernels)
        found[layer] = weights.up if weights.gate is None else weights.gate
    return found


def _predictor(layer: int, gate: F32, threshold: float, ahead: int = 0) -> Predictor:
    one = np.eye(gate.shape[1], dtype=np.float32)
    first, second = np.concatenate([one, -one]), np.concatenate([gate, -gate], axis=1)
    return Predictor(layer, PredictorMatrix.of(first, "f16"), PredictorMatrix.of(second, "f16"), threshold, ahead)
