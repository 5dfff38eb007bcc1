"""Sparsity data in PowerInfer's files: predictors, and marks of the neurons that its solver puts on the GPU."""

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


def write_sparsity_data(model: Model, source: Source, directory: Path) -> None:
    """Write the predictors and GPU marks of a model's source, if it has any, into the directory of its pack.

    Raises:
        ModelError: if a predictor does not have the shape of its layer or is not finite, or if the marks are not one 0
            or 1 for each neuron. The message names the tensor.
        WeightsError: if a file cannot be written.
    """
    if model.predictors:
        save_predictors(directory / NAME, [_predictor(model, source, refs) for refs in model.predictors], "powerinfer")
    if model.gpu_marks_file:
        save_marks(directory / MARKED, read_split(model.gpu_marks_file, model))


def read_split(path: Path, model: Model) -> Active:
    """Return which neurons PowerInfer's solver puts on the GPU: bool `[layers, neurons]`.

    A layer that is missing in the file has no such neurons.

    Raises:
        ModelError: if the file is not a PowerInfer file, or its marks are not one 0 or 1 for each neuron.
    """
    config = model.config
    marks = np.zeros((config.layers, config.intermediate), np.bool_)
    with open_gguf(path) as source:
        if not source.powerinfer:
            raise ModelError(f"{path} is not a split file of PowerInfer: it does not begin with PWRI; remove it")
        for layer in range(config.layers):
            if (name := MARKS.format(i=layer)) in source.tensors:
                marks[layer] = _marked(source, name, config.intermediate)
    return marks


def _predictor(model: Model, source: Source, refs: PredictorRefs) -> Predictor:
    rank = find(source, refs.first).rows
    if not 1 <= rank <= _MOST_RANK:
        raise ModelError(f"{source.label}: a predictor has rank {rank}; it must be from 1 to {_MOST_RANK}")
    first = _matrix(source, refs.first, (rank, model.config.hidden))
    second = _matrix(source, refs.second, (model.config.intermediate, rank))
    return Predictor(
        refs.layer, first, second, refs.threshold, input_kind="residual"
    )  # the input before the norm, as in the graph of PowerInfer's llama.cpp


def _matrix(source: Source, name: str, shape: tuple[int, int]) -> PredictorMatrix:
    tensor = find(source, name)
    if tensor.shape != shape:
        raise ModelError(f"{source.label}: tensor {name} has shape {list(tensor.shape)}; its layer needs {list(shape)}")
    values = decode(tensor.element, source.read(tensor, (0, tensor.rows), (0, tensor.columns)))
    quantised = tensor.element.quantised and shape[1] % GROUP == 0
    return PredictorMatrix.of(values, "q8" if quantised else "f16")


def _marked(source: GgufSource, name: str, neurons: int) -> Active:
    """Return the marks of one layer, bool `[neurons]`. They are stored as I32 or, in older files, as F32."""
    tensor = source.tensors[name]
    kinds = {"I32": "<i4", "F32": "<f4"}
    if tensor.element.name not in kinds or math.prod(tensor.shape) != neurons:
        raise ModelError(f"{source.label}: {name} is not one number for each of {neurons} neurons; convert it again")
    raw = source.read(tensor, (0, tensor.rows), (0, tensor.columns))
    marks = raw.reshape(-1).view(kinds[tensor.element.name])
    if not np.isin(marks, (0, 1)).all():
        raise ModelError(f"{source.label}: {name} has marks that are neither 0 nor 1; convert it again")
    return np.asarray(marks != 0)
