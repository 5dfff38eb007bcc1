"""Strings in values of JSON: finding them, changing them, and characters that none of them has."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any


def texts_of(value: Any) -> Iterator[str]:
    """All strings in `value`, in whatever they are nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in texts_of(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for part in value for text in texts_of(part))


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with all its strings changed, but for the role of a message and the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        kept = {key: part for key, part in value.items() if key == "role" and isinstance(part, str)}
        return {key: mapped(part, change) for key, part in value.items()} | kept
    return [mapped(part, change) for part in value] if isinstance(value, (list, tuple)) else value


def unused(texts: Iterable[str], count: int) -> tuple[str, ...]:
    """So many characters of a private-use plane that none of `texts` has."""
    used = set("".join(texts))
    free = (character for character in map(chr, range(0xF0000, 0xFFFFE)) if character not in used)
    return tuple(islice(free, count))
