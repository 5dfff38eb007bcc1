"""What PowerInfer's files say of neurons: predictors, kept as they are, and which neurons it would put on the GPU."""

import math
from pathlib import Path

import numpy as np

from tpi.errors import ModelError
from tpi.families.base import Model, PredictorRefs
from tpi.families.gguf.powerinfer import MARKS
from tpi.pack.layout import GROUP
from tpi.sources.base import Source, find
from tpi.sources.elements import decode
from tpi.sources.gguf import GgufSource, open_gguf
from tpi.sparsity.files import NAME, save_predictors
from tpi.sparsity.predictor import Predictor, PredictorMatrix
from tpi.sparsity.usage import MARKED, Active, save_marks

_MOST_RANK = 1 << 14


def keep_beside(model: Model, source: Source, directory: Path) -> None:
    """Write what a model's source says of neurons into the directory of its pack: predictors, and marks.

    Raises:
        ModelError: naming the tensor, if a predictor is of another shape than its layer, or not finite, or if marks are
            not one 0 or 1 for each neuron.
        WeightsError: if a file cannot be written.
    """
    if model.predictors:
        save_predictors(directory / NAME, [_predictor(model, source, refs) for refs in model.predictors], "powerinfer")
    if model.marks:
        save_marks(directory / MARKED, read_split(model.marks, model))


def read_split(path: Path, model: Model) -> Active:
    """Which neurons PowerInfer's solver puts on the GPU: `[layers, neurons]`, none of a layer that the file leaves out.

    Raises:
        ModelError: if it is no file of PowerInfer's, or its marks are not one 0 or 1 for each neuron.
    """
    config = model.config
    marks = np.zeros((config.layers, config.intermediate), np.bool_)
    with open_gguf(path) as source:
        if not source.powerinfer:
            raise ModelError(f"{path} is not a split file of PowerInfer's: it does not begin with PWRI; remove it")
        for layer in range(config.layers):
            if (name := MARKS.format(i=layer)) in source.tensors:
                marks[layer] = _marked(source, name, config.intermediate)
    return marks


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


def _marked(source: GgufSource, name: str, neurons: int) -> Active:
    """The converter writes I32, older ones F32."""
    tensor = source.tensors[name]
    kinds = {"I32": "<i4", "F32": "<f4"}
    if tensor.element.name not in kinds or math.prod(tensor.shape) != neurons:
        raise ModelError(f"{source.label}: {name} is not one number for each of {neurons} neurons; convert it again")
    raw = source.read(tensor, (0, tensor.rows), (0, tensor.columns))
    marks = raw.reshape(-1).view(kinds[tensor.element.name])
    if not np.isin(marks, (0, 1)).all():
        raise ModelError(f"{source.label}: {name} has other marks than 0 and 1; convert it again")
    return np.asarray(marks != 0)
