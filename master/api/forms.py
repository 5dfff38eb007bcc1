"""Base classes of request bodies: strict types, no unknown fields, JSON within limits."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from master.api.failures import RequestError
from master.api.unused import advice_on

MOST_DEPTH = 64  # levels of nested values
MOST_VALUES = 1 << 17  # values in a body: a prompt of token ids has as many as the longest context
MOST_INNER = 1 << 16  # values in a JSON text inside a body
_OPENING = ",[{"  # each character begins at most one more value
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""Matches strings.

A string without an end is matched to the end of the text; retrying at each quote would take hours.
"""
_HALVES = re.compile("[\ud800-\udfff]")
_LARGEST = sys.float_info.max


class FormPart(BaseModel):
    """A part of a body. Types are strict: a number is not a string. Unknown fields are refused.

    Attributes:
        harmless: fields that are accepted and ignored, because no value of them changes the answer.
        neutral: fields that are not supported, with the values that are accepted because they change nothing. Null is
            always accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        """Return `data` without the fields that change nothing; pydantic refuses the unknown fields that are left."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if not cls._is_unused(name, value)}

    @classmethod
    @cache
    def fields(cls) -> frozenset[str]:
        """Return the names of the fields that this form reads, with their aliases."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _is_unused(cls, name: str, value: Any) -> bool:
        """Return True if the field `name` with `value` changes nothing. Null in an optional field counts as absent."""
        if name in cls.fields():
            return value is None and name not in cls._required()
        return value is None or name in cls.harmless or value in cls.neutral.get(name, ())

    @classmethod
    @cache
    def _required(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items() if field.is_required())


class Body(FormPart):
    """A whole request body."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """Refuse lone surrogates, numbers that are not finite, and values that are nested too deep.

        A list or object with too many entries is refused before its entries are checked, which would take too long.
        """
        for name, field in cls.model_fields.items() if isinstance(data, dict) else ():
            value, most = data.get(field.alias or name), _most_entries(field)
            if isinstance(value, (list, dict)) and len(value) > most:
                raise RequestError(f"{name}: it has {len(value)} entries; give at most {most}", name, "invalid_value")
        for name, value in data.items() if isinstance(data, dict) else ():
            check_values(value, name if name in cls.model_fields else _shown(name))
        return data


def _most_entries(field: FieldInfo) -> int:
    limits = (getattr(limit, "max_length", None) for limit in field.metadata)
    return min([limit for limit in limits if limit is not None], default=MOST_VALUES)


def _shown(name: str) -> str:
    """Return the name of an unknown field, shortened and in ASCII, for an error message."""
    return ascii(name)[1:-1][:64]


def check_values(value: Any, field: str) -> None:
    """Refuse JSON that later stages cannot handle, in a body or in a text inside a body.

    Raises:
        RequestError: about `field`, if `value` has more than MOST_VALUES values, is nested deeper than
            MOST_DEPTH, or has a lone surrogate or a number that is not finite or too long.
    """
    if (problem := problem_of(value)) is not None:
        raise RequestError(f"{field}: {problem}", field, "invalid_value")


def may_have_more_values(text: str, most: int) -> bool:
    """Return False if JSON text surely has at most `most` values. All separators count, even those inside strings."""
    return sum(map(text.count, _OPENING)) > most


def has_more_values(text: str, most: int) -> bool:
    """Return True if JSON text has more than `most` values.

    It is not parsed, because that would delay all other clients.
    """
    if not may_have_more_values(text, most):
        return False
    structure = _STRINGS.sub("", text)
    return sum(map(structure.count, _OPENING)) > most


def call_arguments(text: str | None, field: str) -> dict[str, Any] | str:
    """Return the arguments of a call in a history as an object; text that is not a JSON object stays text.

    An answer that was cut off can leave incomplete JSON, and its conversation must remain usable.

    Raises:
        RequestError: about `field`, if there are more than MOST_INNER values, or for the reasons of `check_values`.
    """
    text = text or "{}"
    if has_more_values(text, MOST_INNER):
        raise RequestError(f"{field}: there are more than {MOST_INNER} values", field, "invalid_value")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError):
        said = "a number is too long, or values are nested too deep"
        raise RequestError(f"{field}: {said}", field, "invalid_value") from None
    check_values(value, field)
    return value if isinstance(value, dict) else text


def problem_of(value: Any) -> str | None:
    """Return the reason, as text, why templates or JSON cannot carry `value` or a key in it; None if they can."""
    stack, seen = [(value, 0)], 0
    while stack:
        one, depth = stack.pop()
        if depth > MOST_DEPTH:
            return f"values are nested more than {MOST_DEPTH} deep"
        if isinstance(one, (dict, list)):
            seen += len(one)
            if seen > MOST_VALUES:
                return f"there are more than {MOST_VALUES} values"
            parts = (part for pair in one.items() for part in pair) if isinstance(one, dict) else one
            stack += [(part, depth + 1) for part in parts]
        elif isinstance(one, str):
            if _HALVES.search(one):
                return "a text has half a character (a lone surrogate)"
        elif isinstance(one, (int, float)) and not -_LARGEST <= one <= _LARGEST:
            return "a number is not finite, or beyond 1.8e308"
    return None


def refuse(errors: Sequence[Any], body: Any) -> RequestError:
    """Return a RequestError for the most relevant of pydantic's `errors` about `body`."""
    error = _truest([dict(error, loc=_inside(error["loc"])) for error in errors], body, 0)
    field = _path(error["loc"], body, missing=error["type"] in ("missing", "extra_forbidden"))
    said = str(error["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    if error["type"] == "extra_forbidden":
        said = advice_on(str(error["loc"][-1]))
    if error["type"] == "json_invalid":
        said, field = f"the body is not JSON: {error.get('ctx', {}).get('error', said)}", None
    where = f"{field}: " if field else ""
    return RequestError(f"{where}{said[:1].lower()}{said[1:]}", field, "invalid_value")


def _truest(errors: Sequence[dict[str, Any]], body: Any, start: int) -> dict[str, Any]:
    """Return the most relevant of pydantic's `errors`; for a union, an error of the branch that fits the value best.

    `start` is the number of leading location parts that earlier calls examined.
    """
    first = errors[0]
    at = _branch(first["loc"], body, start)
    if at is None or (first["type"] == "missing" and at == len(first["loc"]) - 1):
        return first
    branches: dict[str, list[dict[str, Any]]] = {}
    for error in errors:
        if error["loc"][:at] == first["loc"][:at] and len(error["loc"]) > at:
            branches.setdefault(str(error["loc"][at]), []).append(error)
    if all(
        len(found) == 1 and _is_mismatch(found[0]) and len(found[0]["loc"]) == at + 1 for found in branches.values()
    ):
        said = [str(found[0]["msg"]).removeprefix("Input should be ") for found in branches.values()]
        return {**first, "msg": f"Input should be {' or '.join(dict.fromkeys(said))}"}
    best = min(branches.values(), key=lambda found: _misfit(found, at + 1))
    return _truest(best, body, at + 1)


def _misfit(errors: Sequence[Mapping[str, Any]], depth: int) -> tuple[int, ...]:
    """Return a sort key for one branch of a union, from its `errors`; the branch with the lowest key fits best.

    `depth` is the number of location parts down to the branch's name.
    """
    other = _is_mismatch(errors[0]) and len(errors[0]["loc"]) == depth
    first = errors[0]["loc"]
    reached = [part for part in first if isinstance(part, int)]
    return (other, sum(map(_is_mismatch, errors)), len(errors), -len(first), *(-part for part in reached))


def _is_mismatch(error: Mapping[str, Any]) -> bool:
    """Return True if the error says that the value has another type than the union's branch."""
    literal = error["type"] == "literal_error" and not isinstance(error.get("input"), str)
    return literal or str(error["type"]).endswith("_type")


def _branch(location: Sequence[str | int], body: Any, start: int) -> int | None:
    """Return the index of the first location part, from `start` on, that is not in the body; None if all parts are.

    Such a part is the name of a union's branch.
    """
    here = body
    for index, part in enumerate(location):
        found = _below(here, part)
        if found is not None:
            here = found[0]
        elif index >= start:
            return index
    return None


def _below(here: Any, part: str | int) -> tuple[Any] | None:
    """Return `(value,)` for the value of `here` at the key or index `part`; None if there is none."""
    if isinstance(here, dict) and part in here:
        return (here[part],)
    return (here[part],) if isinstance(here, list) and isinstance(part, int) and part < len(here) else None


def _inside(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return one of pydantic's locations without its first part: `body`, `query` or `path`."""
    return tuple(location[1:] if location and location[0] in ("body", "query", "path") else location)


def _path(location: Sequence[str | int], body: Any, missing: bool) -> str | None:
    """Return a location as a path in the body, such as `messages[0].role`, without the names of union branches."""
    path, here = "", body
    for index, part in enumerate(location):
        if (found := _below(here, part)) is not None:
            path, here = f"{path}[{part}]" if isinstance(here, list) else f"{path}.{part}", found[0]
        elif missing and index == len(location) - 1:
            path = f"{path}.{part}"
    return path.removeprefix(".") or None
