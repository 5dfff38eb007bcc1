"""Search in text that comes in pieces: for markers, and for the end of a JSON value."""

import json
from collections.abc import Sequence

_DECODER = json.JSONDecoder(strict=False)
_WORD = 10  # more letters than an unfinished word or escape of JSON can have


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` that `text` ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `markers`."""
    return max((overlap(text, marker) for marker in markers), default=0)


def json_end(text: str, at: int) -> int | None:
    """Return the end of the JSON object or array that begins at the place `at`; None if its end has not come yet.

    Raises:
        ValueError: if there is none, whatever follows.
    """
    if text[at : at + 1] not in ("{", "["):
        raise ValueError("no object or array")
    try:
        return _DECODER.raw_decode(text, at)[1]
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        # at the end of an unfinished text, or where its unfinished string begins
        if error.msg.startswith(("Unterminated", "Invalid")) or len(text) - error.pos < _WORD:
            return None
        raise
