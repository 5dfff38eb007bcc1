"""Sampling settings from a model's own files, used where the user gives none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from master.vocabulary.sampler import Sampling
from tpi.errors import UsageError

_SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's usable settings by their names in `Sampling`, and a note on each setting that cannot be used."""

    values: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "SamplingDefaults":
        """Read the tokenizer's part of a pack's manifest. Invalid settings are ignored, with a note on each.

        `do_sample: false` means greedy, as in transformers.
        """
        said = info.get("sampling")
        values: dict[str, float] = {}
        ignored = []
        for name, setting in _SETTINGS.items():
            value = said.get(name) if isinstance(said, Mapping) else None
            if value is None:
                continue
            if (usable := _usable(setting, value)) is None:
                ignored.append(f"the model's {name} of {str(value)[:40]} is not used: it is not a number in its range")
            else:
                values[setting] = usable
        if isinstance(said, Mapping) and said.get("do_sample") is False:
            values["temperature"] = 0
        return cls(values, tuple(ignored))

    def under(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with the model's settings in place of those that were not given."""
        return replace(sampling, **self.missing(sampling)) if self.values else sampling  # type: ignore[arg-type]

    def missing(self, sampling: Sampling) -> dict[str, float]:
        """Return the model's settings that `sampling` lacks; empty if `sampling` is to be used as it is."""
        given = sampling.given
        return {} if given is None else {name: value for name, value in self.values.items() if name not in given}

    def words(self, sampling: Sampling) -> str:
        """Return a sentence on the model's settings that apply to `sampling`; empty if none does."""
        used = self.missing(sampling)
        if used.get("temperature") == 0:
            return "sampling as the model's files say: greedy (temperature 0); --temp overrides it"
        said = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in used.items())
        return f"sampling as the model's files say: {said}; --temp, --top-k and others override it" if said else ""


def _usable(setting: str, value: object) -> float | None:
    """Return the value as `Sampling` takes it, or None if it is invalid. A `top_k` of -1 means all tokens."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if setting == "top_k":
        if value != int(value):
            return None
        value = max(int(value), 0) if value >= -1 else int(value)
    try:
        Sampling(**{setting: value})  # type: ignore[arg-type]
    except UsageError:
        return None
    return value
