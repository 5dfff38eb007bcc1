"""Strings in JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any


def texts_of(value: Any) -> Iterator[str]:
    """Yield all strings in `value`, at any depth, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in texts_of(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for part in value for text in texts_of(part))
