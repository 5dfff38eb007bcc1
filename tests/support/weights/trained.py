"""The small models from `python -m benchmarks.training`: one with ReLU, and a mixture of experts.

The models are stored in 8 bits with the tests' data. `model.q8.safetensors` has each matrix as its Q8_0 blocks, uint8
`[rows, bytes]`, and each vector as it is. No loader knows this format, so `write_trained` writes a float32 Hugging Face
directory. Packed in q8, the model has exactly the stored codes.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.paths import DATA
from tpi.pack.groups import dequantise_groups, quantise_groups
from tpi.pack.layout import GROUP_BYTES

F32 = npt.NDArray[np.float32]

TRAINED, MIXTURE = DATA / "reglu", DATA / "mixture"
_KEPT = "model.q8.safetensors"
_PLAIN = ("config.json", "tokenizer.json", "tokenizer_config.json")
TEXT = TRAINED / "held_out.txt"  # of the text that the model was not trained on
PREDICTORS = TRAINED / "predictors.safetensors"  # made by `python -m benchmarks.training.predictors --keep`
UNSEEN = TRAINED / "unseen.txt"  # of the text that neither the model nor its predictors were trained on


def trained_facts(kept: Path = TRAINED) -> dict[str, Any]:
    """Return the measurements stored with the model: perplexity, and the use of its neurons or experts."""
    found: dict[str, Any] = json.loads((kept / "facts.json").read_text())
    return found


def write_trained(directory: Path, kept: Path = TRAINED) -> Path:
    """Write the model as a Hugging Face directory in float32, unless it exists; return the directory."""
    from safetensors.numpy import load_file, save_file

    target = directory / "model.safetensors"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        for name in _PLAIN:
            shutil.copyfile(kept / name, directory / name)
        tensors = {name: _restored(values) for name, values in load_file(kept / _KEPT).items()}
        save_file(tensors, directory / "model.partial")
        (directory / "model.partial").rename(target)
    return directory


def keep_trained(kept: Path, weights: Mapping[str, F32], config: Mapping[str, Any], tokenizer: Path, text: str) -> None:
    """Write a trained model to `kept`, a folder of the tests' data, with matrices rounded to 8 bits."""
    from safetensors.numpy import save_file

    kept.mkdir(exist_ok=True)
    save_file({name: _rounded(values) for name, values in weights.items()}, kept / _KEPT)
    (kept / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copyfile(tokenizer, kept / "tokenizer.json")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (kept / "tokenizer_config.json").write_text(json.dumps(settings))
    (kept / TEXT.name).write_text(text)


def _rounded(values: F32) -> npt.NDArray[Any]:
    if values.ndim == 1:
        return np.ascontiguousarray(values, np.float32)
    return np.ascontiguousarray(quantise_groups("q8", values).reshape(len(values), -1))


def _restored(values: npt.NDArray[Any]) -> F32:
    if values.dtype != np.uint8:
        return np.asarray(values, np.float32)
    return dequantise_groups("q8", values.reshape(len(values), -1, GROUP_BYTES["q8"]))
