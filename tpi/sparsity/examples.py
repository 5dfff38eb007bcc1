"""What predictors learn from: the inputs of a model's feed-forward networks over a text, and what they activate."""

from collections.abc import Iterator, Mapping

from tpi.config import SPARSE
from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.sparsity.replay import F32, I32, FfnWeights, dense, replay
from tpi.sparsity.training import Active, LayerExamples


def examples_of(pack: Pack, tokens: I32, kernels: Kernels, ahead: int = 0) -> Mapping[int, LayerExamples]:
    """Of every layer, over `tokens` `[sequences, length]`; the first layers look ahead as far as there are layers.

    It takes `hidden` floats and `neurons` bytes for each token and layer.

    Raises:
        ModelError: if activations of this model are never 0, or it has experts.
    """
    if pack.config.activation not in SPARSE:
        raise ModelError(f"{pack.path} has {pack.config.activation} activations, which are never 0; use thresholds")
    inputs: list[F32] = []
    active: list[Active] = []

    def watch(layer: int, weights: FfnWeights, x: F32) -> F32:
        inputs.append(x.copy())
        active.append(weights.gated(x) != 0)
        return dense(layer, weights, x)

    replay(pack, tokens, kernels, watch)
    return {one.layer: one for one in _joined(inputs, active, ahead)}


def _joined(inputs: list[F32], active: list[Active], ahead: int) -> Iterator[LayerExamples]:
    for layer, found in enumerate(active):
        far = min(ahead, layer)
        yield LayerExamples(layer, inputs[layer - far], found, far)
