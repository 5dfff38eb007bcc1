"""How a model's makers want tokens to be drawn, as its files say; read again by `master.generation.defaults`."""

import math
from collections.abc import Mapping
from typing import Any

_NAMES = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of generation_config.json
_GGUF = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_LONGEST = 40  # characters of what is not a number


def sampling_of_directory(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return what generation_config.json says of sampling, by its own names."""
    return {name: _scalar(generation[name]) for name in _NAMES if generation.get(name) is not None}


def sampling_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the `general.sampling` keys of a GGUF file say, by the names of generation_config.json."""
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF.items()}
    return {name: _scalar(value) for name, value in given.items() if value is not None}


def _scalar(value: object) -> bool | int | float | str:
    """Return a number as it is, and anything else as text, for the note that it is ignored."""
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return repr(value)[:_LONGEST]
