"""What PowerInfer's files say of neurons: predictors, kept as they are, and which neurons it would put on the GPU."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.families.base import Model, PredictorRefs
from tpi.pack.layout import GROUP
from tpi.sources.base import Source, find
from tpi.sources.elements import decode
from tpi.sources.gguf import GgufSource, open_gguf
from tpi.sparsity.files import NAME, save_predictors
from tpi.sparsity.predictor import Predictor, PredictorMatrix

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
_MOST_RANK = 1 << 14


def keep_predictors(model: Model, source: Source, directory: Path) -> None:
    """Write the predictors that a model's source has into the directory of its pack.

    Raises:
        ModelError: naming the tensor, if one is of another shape than its layer, or not finite.
        WeightsError: if the file cannot be written.
    """
    save_predictors(directory / NAME, [_predictor(model, source, refs) for refs in model.predictors], "powerinfer")


def read_split(path: Path, model: Model) -> dict[int, I32]:
    """The neurons of each layer that a PowerInfer split file places on the GPU, in order.

    Raises:
        ModelError: if it is no such file, or its marks are not one 0 or 1 for each neuron.
    """
    with open_gguf(path) as source:
        if not source.powerinfer:
            raise ModelError(f"{path} is not a split file of PowerInfer's: it does not begin with PWRI")
        layers = [layer for layer in range(model.config.layers) if f"blk.{layer}.gpu_idx" in source.tensors]
        return {layer: _marked(source, f"blk.{layer}.gpu_idx", model.config.intermediate) for layer in layers}


def _predictor(model: Model, source: Source, refs: PredictorRefs) -> Predictor:
    rank = find(source, refs.first).rows
    if not 1 <= rank <= _MOST_RANK:
        raise ModelError(f"{source.label}: a predictor of rank {rank} cannot be")
    first = _matrix(source, refs.first, (rank, model.config.hidden))
    second = _matrix(source, refs.second, (model.config.intermediate, rank))
    return Predictor(
        refs.layer, first, second, refs.threshold, given="residual"
    )  # before the norm, as llama.cpp's graph


def _matrix(source: Source, name: str, shape: tuple[int, int]) -> PredictorMatrix:
    tensor = find(source, name)
    if tensor.shape != shape:
        raise ModelError(
            f"{source.label}: tensor {name} has shape {list(tensor.shape)}; its layer asks for {list(shape)}"
        )
    values = decode(tensor.element, source.read(tensor, (0, tensor.rows), (0, tensor.columns)))
    quantised = tensor.element.quantised and shape[1] % GROUP == 0
    return PredictorMatrix.of(values, "q8" if quantised else "f16")


def _marked(source: GgufSource, name: str, neurons: int) -> I32:
    tensor = source.tensors[name]
    if tensor.element.name != "I32" or math.prod(tensor.shape) != neurons:
        raise ModelError(f"{source.label}: {name} is not one whole number for each of {neurons} neurons")
    marks = source.read(tensor, (0, tensor.rows), (0, tensor.columns)).reshape(-1).view("<i4")
    if not np.isin(marks, (0, 1)).all():
        raise ModelError(f"{source.label}: {name} has other marks than 0 and 1")
    return np.flatnonzero(marks).astype(np.int32)
