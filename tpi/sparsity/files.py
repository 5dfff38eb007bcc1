"""The file of a model's predictors: a safetensors file in the pack's directory.

`layer.N.first` and `layer.N.second` are F16 `[rows, columns]`, or U8 `[rows, bytes]` of Q8_0 or Q4_0 blocks.
`layer.N.bias` is F32 `[neurons]`, and may be missing. The metadata entry `predictors` is JSON. It has for each layer
the columns, the threshold, the look-ahead in layers, and the kind of input.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError, WeightsError
from tpi.sources.files import parse_json
from tpi.sources.safetensors import read_header
from tpi.sparsity.predictor import InputKind, Predictor, PredictorMatrix
from tpi.system.atomic import write_atomically

NAME = "predictors.safetensors"  # in the pack's directory
VERSION = 1
_MOST_BYTES = 4 << 30
_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "U8": np.dtype(np.uint8)}
_MATRICES = ("first", "second")


def save_predictors(path: Path, predictors: Sequence[Predictor], source: str = "") -> None:
    """Write the predictors of a model to `path`, atomically. `source` records where they come from.

    Raises:
        WeightsError: if the file cannot be written.
    """
    from safetensors.numpy import save

    tensors: dict[str, npt.NDArray[Any]] = {}
    for one in predictors:
        for name in _MATRICES:
            tensors[f"layer.{one.layer}.{name}"] = np.ascontiguousarray(getattr(one, name).stored)
        if one.bias is not None:
            tensors[f"layer.{one.layer}.bias"] = one.bias
    described = {"version": VERSION, "source": source, "layers": [_described(one) for one in predictors]}
    try:
        write_atomically(path, save(tensors, {"predictors": json.dumps(described)}))
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error.strerror}; free some disk, or choose another place") from error


def load_predictors(path: Path) -> dict[int, Predictor]:
    """Return the predictors in a file, by layer; empty if the file does not exist.

    Raises:
        ModelError: if the file is damaged or has another version.
    """
    if not path.exists():
        return {}
    try:
        described = _metadata(path)
        tensors = _tensors(path)
        return {int(one["layer"]): _predictor(one, tensors) for one in described["layers"]}
    except (ModelError, KeyError, TypeError, ValueError, RecursionError, OverflowError, OSError) as error:
        raise ModelError(
            f"{path} cannot be used ({str(error)[:200]}); remove it, or profile the model again"
        ) from error


def _described(one: Predictor) -> dict[str, Any]:
    return {
        "layer": one.layer, "hidden": one.first.columns, "rank": one.rank, "neurons": one.neurons,
        "threshold": one.threshold, "ahead": one.ahead, "given": one.input_kind,
    }  # fmt: skip


def _metadata(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(min(length, 8 << 20)))
    described = parse_json(header["__metadata__"]["predictors"].encode())
    if described["version"] != VERSION or not isinstance(described["layers"], list):
        raise ValueError(f"version {str(described['version'])[:20]}, not {VERSION}")
    return dict(described)


def _tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read all tensors into memory, after checking that the file is as long as its header says and none overlap."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    found: dict[str, npt.NDArray[Any]] = {}
    for tensor in read_header(path):
        dtype = _DTYPES[tensor.element.name]
        count = int(np.prod(tensor.shape, dtype=np.int64))
        found[tensor.name] = np.fromfile(path, dtype, count, offset=tensor.offset).reshape(tensor.shape)
    return found


def _predictor(described: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> Predictor:
    layer, rank = int(described["layer"]), int(described["rank"])
    first, second = (tensors[f"layer.{layer}.{name}"] for name in _MATRICES)
    if first.ndim != 2 or second.ndim != 2 or len(first) != rank or len(second) != int(described["neurons"]):
        raise ValueError(f"the matrices of layer {layer} do not have the shapes in its metadata")
    if described["given"] not in get_args(InputKind):
        raise ValueError(f"layer {layer} has the unknown kind of input {str(described['given'])[:20]!r}")
    return Predictor(
        layer, PredictorMatrix(first, int(described["hidden"])), PredictorMatrix(second, rank),
        float(described["threshold"]), int(described["ahead"]), described["given"], tensors.get(f"layer.{layer}.bias"),
    )  # fmt: skip
