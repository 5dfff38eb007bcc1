"""Sampling settings from a model's own files, used where the user gives none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from master.vocabulary.sampler import Sampling
from tpi.errors import UsageError
from tpi.pack.builder.sampling import SUPPRESSED

_SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's usable settings by their names in `Sampling`, and a note on each setting that cannot be used.

    The tokens in `suppressed` are never drawn, whatever the user gives.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    suppressed: tuple[int, ...] = ()

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
        listed = said.get(SUPPRESSED) if isinstance(said, Mapping) else None
        ids = listed if isinstance(listed, list) and all(type(one) is int and one >= 0 for one in listed) else None
        if listed is not None and ids is None:
            ignored.append(f"the model's {SUPPRESSED} of {str(listed)[:40]} is not used: token ids are expected")
        return cls(values, tuple(ignored), tuple(ids or ()))

    def under(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with the model's settings in place of those that the user did not give."""
        if not self.values and not self.suppressed:
            return sampling
        return replace(sampling, suppressed=self.suppressed, **self.missing(sampling))  # type: ignore[arg-type]

    def missing(self, sampling: Sampling) -> dict[str, float]:
        """Return the model's settings that `sampling` lacks; empty if `sampling` needs none of them."""
        given = sampling.given
        return {} if given is None else {name: value for name, value in self.values.items() if name not in given}

    def words(self, sampling: Sampling) -> str:
        """Return a sentence on the model's settings that apply to `sampling`; empty if no setting applies."""
        used = self.missing(sampling)
        if used.get("temperature") == 0:
            return "sampling as the model's files say: greedy (temperature 0); --temp overrides it"
        said = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in used.items())
        return f"sampling as the model's files say: {said}; --temp, --top-k and others override it" if said else ""


def _usable(setting: str, value: object) -> float | None:
    """Return the value in the form of `Sampling`, or None if it is invalid. A `top_k` of -1 means all tokens."""
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
