"""What all bodies of requests have in common: strict types, unknown fields ignored, text that is text."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from master.api.failures import RequestError
from tpi.errors import UsageError

MOST_DEPTH = 64  # of values in values
MOST_VALUES = 1 << 18  # in a body; a prompt of token ids has as many as the longest context
_HALVES = re.compile("[\ud800-\udfff]")


class FormPart(BaseModel):
    """A part of a body. Types are not guessed: a number is no string."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Body(FormPart):
    """A whole body."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """Refuses halves of characters, which no tokenizer takes, and values that are nested too deep.

        What has too many entries is refused by their number: looking at each would take as long as an answer.
        """
        for name, field in cls.model_fields.items() if isinstance(data, dict) else ():
            value, most = data.get(field.alias or name), _most_entries(field)
            if isinstance(value, (list, dict)) and len(value) > most:
                raise RequestError(f"{name}: it has {len(value)} entries; give at most {most}", name, "invalid_value")
        if any(_HALVES.search(text) for text in _strings(data)):
            raise ValueError("a text has half a character (a lone surrogate)")
        return data


def _most_entries(field: FieldInfo) -> int:
    """How many entries a list or an object may have as this field."""
    limits = (getattr(limit, "max_length", None) for limit in field.metadata)
    return min([limit for limit in limits if limit is not None], default=MOST_VALUES)


def _strings(value: Any) -> Iterator[str]:
    """All strings in `value`, names of fields included."""
    stack, seen = [(value, 0)], 0
    while stack:
        one, depth = stack.pop()
        seen += len(one) if isinstance(one, (dict, list)) else 0
        if seen > MOST_VALUES:
            raise ValueError(f"there are more than {MOST_VALUES} values")
        if depth > MOST_DEPTH:
            raise ValueError(f"values are nested more than {MOST_DEPTH} deep")
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            stack += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list):
            stack += [(part, depth + 1) for part in one]


def refuse(errors: Sequence[Any], body: Any) -> RequestError:
    """The first of pydantic's `errors` about `body`, as one of ours."""
    first = errors[0]
    field = _path(first["loc"], body, missing=first["type"] == "missing")
    said = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        said, field = f"the body is no JSON: {first.get('ctx', {}).get('error', said)}", None
    where = f"{field}: " if field else ""
    return RequestError(f"{where}{said[:1].lower()}{said[1:]}", field, "invalid_value")


def _path(location: Sequence[str | int], body: Any, missing: bool) -> str | None:
    """Where in the body it is; pydantic names the branches of a union, too, which are no place."""
    path, here = "", body
    for part in location[1:] if location and location[0] in ("body", "query", "path") else location:
        if isinstance(here, dict) and part in here:
            path, here = f"{path}.{part}", here[part]
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif missing and part == location[-1]:
            path = f"{path}.{part}"
    return path.removeprefix(".") or None


def checked(field: str, error: UsageError) -> RequestError:
    """An error of the project about `field`."""
    return RequestError(f"{field}: {error}", field, "invalid_value")
