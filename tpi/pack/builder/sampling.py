"""Sampling defaults from a model's files, for the manifest. `master.generation.defaults` reads them from there."""

import math
from collections.abc import Mapping
from typing import Any

_NAMES = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # keys of generation_config.json
_GGUF = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
SUPPRESSED = "suppress_tokens"  # in both kinds of files
_LONGEST = 40  # limit in characters of a value that is not a number


def sampling_of_directory(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings of generation_config.json, by their names there."""
    found = {name: _scalar(generation[name]) for name in _NAMES if generation.get(name) is not None}
    return found | _suppressed(generation.get(SUPPRESSED))


def sampling_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a GGUF file, by their names in generation_config.json."""
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF.items()}
    found = {name: _scalar(value) for name, value in given.items() if value is not None}
    return found | _suppressed(metadata.get(f"tokenizer.ggml.{SUPPRESSED}"))


def _suppressed(tokens: object) -> dict[str, Any]:
    """Return the ids of the tokens that are never drawn, as the model's files list them. Empty if there are none."""
    if not tokens:
        return {}
    ids = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    return {SUPPRESSED: tokens if ids else _scalar(tokens)}


def _scalar(value: object) -> bool | int | float | str:
    """Return a finite number or a boolean unchanged, and any other value as short text.

    A warning later quotes that text when it says that the setting is ignored.
    """
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return repr(value)[:_LONGEST]
