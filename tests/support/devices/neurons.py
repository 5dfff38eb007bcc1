"""A sparse model for accelerators, and predictors that are always right: they name active neurons, or all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.neurons.costs import LineCost
from tests.support.weights.trained import write_trained
from tpi.kernels import open_kernels
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from tpi.sparsity.predictor import InputKind
from tpi.sparsity.replay import FfnWeights, read_ffn
from worker.neurons.lookahead import Scorer

F32 = npt.NDArray[np.float32]
CERTAIN = 1e4  # a score
FAST, SLOW = LineCost(1.0, 0.1), LineCost(0.5, 1.0)  # costs of neurons
SMALL: dict[str, Any] = {"context": 64, "pool": 96}  # what its nodes have room for


def relu_packs(directory: Path) -> Callable[[str], Pack]:
    """Return the packs of the trained ReGLU model by dtype, made once in `directory`."""
    source = write_trained(directory / "model")

    def get(dtype: str) -> Pack:
        if not (directory / dtype).exists():
            pack_model(open_source(source), dtype, directory / dtype)
        return Pack.open(directory / dtype)

    return get


@dataclass(frozen=True, eq=False)
class Exact:
    """A scorer that names the neurons whose gate is above 0."""

    weights: FfnWeights
    threshold: float = 0.0
    ahead: int = 0
    input_kind: InputKind = "normed"

    def scores(self, x: F32, /) -> F32:
        return np.where(self.weights.gated(x) != 0, CERTAIN, -CERTAIN).astype(np.float32)


@dataclass(frozen=True, eq=False)
class All(Exact):
    """A scorer that names all neurons."""

    def scores(self, x: F32, /) -> F32:
        return np.full((len(x), len(self.weights.up)), np.float32(CERTAIN))


def scorers(pack: Pack, kind: type[Exact]) -> dict[int, Scorer]:
    """Return a scorer of `kind` for each layer of a dense model."""
    kernels = open_kernels()
    blocks = {layer: blocks[-1] for layer, blocks in enumerate(pack.layers)}
    return {layer: kind(read_ffn(pack.config, block, kernels)) for layer, block in blocks.items()}
