"""Bounds on what a chat template's operators, filters and methods can make: checked before anything large is made."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

VALUE_CHARS = 8 << 20  # of any value, and of a whole rendering
WIDTH = 100_000  # the largest number given to a filter or a method, such as a width
BITS = 256  # of a product or power of whole numbers

_GROWING = (
    "join",
    "replace",
    "indent",
    "tojson",
    "expandtabs",
    "translate",
)  # may make a product of what they are given
_FORMATS = ("format", "format_map")
_LONG_NUMBER, _WIDTH_GIVEN = (
    re.compile(r"\d{6}"),
    re.compile(r"\*|:[^}]*\{"),
)  # in a format: a width, or one from outside


def check_call(name: str, values: Sequence[Any]) -> None:
    """Refuse a filter or method whose result could be too large; the first of `values` is what it is applied to."""
    total = size(values)
    if name in _FORMATS:
        check_format(values)
        return
    numbers = [abs(value) for value in values[1:] if isinstance(value, int)]
    if any(number > WIDTH for number in numbers):
        raise TemplateError(f"a number given to {name} is over {WIDTH}")
    if name in _GROWING and values:
        first = size(values[:1])
        if (1 + first) * (1 + total - first + sum(numbers)) > VALUE_CHARS:
            raise TemplateError(f"{name} could make more than {VALUE_CHARS} characters")


def check_product(operator: str, left: Any, right: Any) -> None:
    """Refuse `*` and `**` whose result would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > BITS:
            raise TemplateError(f"a result of {operator} would be too large")
    elif isinstance(left, int) or isinstance(right, int):
        number, value = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(value, float) and number * max(1, size((value,))) > VALUE_CHARS:
            raise TemplateError(f"a result of {operator} would be too large")


def check_format(values: Sequence[Any]) -> None:
    """Refuse a width of a million in a format, the first of `values`, or in what is formatted."""
    form, *given = values
    if _LONG_NUMBER.search(str(form)) or (_WIDTH_GIVEN.search(str(form)) and _largest(given) > WIDTH):
        raise TemplateError(f"a width in a format is over {WIDTH}")


def _largest(values: Iterable[Any]) -> int:
    """The largest whole number in `values` and the tuples in it."""
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return max((abs(value) for value in flat if isinstance(value, int)), default=0)


def size(values: Sequence[Any]) -> int:
    """Characters and entries in `values`, in whatever they are nested; an object in several places counts for each."""
    total, stack = 0, list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, (str, bytes, list, tuple, Mapping)):
            total += len(value)
            if total > VALUE_CHARS:
                raise TemplateError(f"a value has more than {VALUE_CHARS} characters")
            if isinstance(value, Mapping):
                stack += [*value.keys(), *value.values()]
            elif not isinstance(value, (str, bytes)):
                stack += value
    return total


def checked(result: Any) -> Any:
    """`result`, unless it is too large to go on with."""
    if isinstance(result, (str, bytes, list, tuple)) and len(result) > VALUE_CHARS:
        raise TemplateError(f"a value has more than {VALUE_CHARS} characters")
    return result


def metered(items: Iterator[Any]) -> Iterator[Any]:
    """`items` up to the limit of a value; they may be made while they are taken."""
    total = 0
    for item in items:
        total += 1 + size((item,))
        if total > VALUE_CHARS:
            raise TemplateError(f"a list has more than {VALUE_CHARS} characters")
        yield item
