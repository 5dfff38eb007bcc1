"""Opening of a Hugging Face directory: the model that its config.json describes, and its weights.

The codes, scales and zero points of a quantised weight become one tensor.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields, Model
from tpi.families.huggingface.reader import from_huggingface
from tpi.sources.base import Source, read_vector
from tpi.sources.files import read_json, read_json_if_there
from tpi.sources.quantised.source import FIELD, MLX, join_quantised, method_of
from tpi.sources.safetensors import open_safetensors

_MODELOPT, _GPTQ = "hf_quant_config.json", "quantize_config.json"


def read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the fields of the config.json of `directory`.

    If it does not say how weights are quantised, quantize_config.json (of GPTQ) or hf_quant_config.json (of ModelOpt)
    becomes its `quantization_config`.

    Raises:
        ModelError: if a file is missing, too large, or not a JSON object.
    """
    fields = read_json(directory, name)
    if fields.get(FIELD) or fields.get(MLX):
        return fields
    if found := read_json_if_there(directory, _GPTQ):
        return fields | {FIELD: {"quant_method": "gptq"} | found}
    found = read_json_if_there(directory, _MODELOPT)
    settings = found.get("quantization")
    if not isinstance(settings, dict) or settings.get("quant_algo") is None:
        return fields
    return fields | {FIELD: {"quant_method": "modelopt"} | found}


def open_directory(path: Path, fields: Fields) -> tuple[Model, Source]:
    """Return the model of a directory whose config.json has these fields, and its weights.

    Raises:
        ModelError: if a file is damaged, or the model is not supported.
    """
    source: Source = open_safetensors(path)
    stored, lost = source, tuple[str, ...]()
    try:
        method = method_of(fields)
        if method is not None:
            source, lost = join_quantised(source, method)
    except ModelError as error:
        stored.close()
        raise error if str(error).startswith(str(path)) else ModelError(f"{path}: {error}") from error
    model = from_huggingface(fields, source.tensors.__contains__, str(path))
    unused = tuple(_biases_of_zeros(source, stored)) if method is not None else ()
    return replace(model, notes=(*model.notes, *lost), ignored_tensors=(*model.ignored_tensors, *unused)), source


def _biases_of_zeros(source: Source, stored: Source) -> Iterator[str]:
    """Yield the names of the bias tensors that contain only zeros, which GPTQ adds to models without biases."""
    for name in stored.tensors:
        bias = f"{name.removesuffix('.qweight')}.bias"
        if name.endswith(".qweight") and bias in source.tensors and not read_vector(source, bias).any():
            yield bias
