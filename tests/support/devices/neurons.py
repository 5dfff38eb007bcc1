"""Predictors that are always right, in two ways: they name the neurons that are active, or all."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.kernels import open_kernels
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import Given
from tpi.sparsity.replay import FfnWeights, read_ffn
from worker.neurons.foresight import Scorer

F32 = npt.NDArray[np.float32]
CERTAIN = 1e4  # a score


@dataclass(frozen=True, eq=False)
class Exact:
    """Names the neurons whose gate is open."""

    weights: FfnWeights
    threshold: float = 0.0
    ahead: int = 0
    given: Given = "normed"

    def scores(self, x: F32, /) -> F32:
        return np.where(self.weights.gated(x) != 0, CERTAIN, -CERTAIN).astype(np.float32)


@dataclass(frozen=True, eq=False)
class All(Exact):
    """Names all."""

    def scores(self, x: F32, /) -> F32:
        return np.full((len(x), len(self.weights.up)), np.float32(CERTAIN))


def scorers(pack: Pack, kind: type[Exact]) -> dict[int, Scorer]:
    """One for each layer of a dense model."""
    kernels = open_kernels()
    blocks = {layer: blocks[-1] for layer, blocks in enumerate(pack.layers)}
    return {layer: kind(read_ffn(pack.config, block, kernels)) for layer, block in blocks.items()}
