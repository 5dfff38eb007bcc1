"""Strings in values of JSON."""

from collections.abc import Iterator, Mapping
from typing import Any


def texts_of(value: Any) -> Iterator[str]:
    """All strings in `value`, in whatever they are nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in texts_of(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for part in value for text in texts_of(part))
