"""Search in text that comes in pieces: for markers, and for the end of a JSON value."""

import json
from collections.abc import Sequence

_DECODER = json.JSONDecoder(strict=False)
_WORD = 10  # an upper bound for the letters of an unfinished word or escape in JSON


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` that `text` ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of one of `markers`."""
    return max((overlap(text, marker) for marker in markers), default=0)


def json_end(text: str, at: int) -> int | None:
    """Return the index after the JSON object or array that begins at the index `at`; None if the text ends within it.

    Raises:
        ValueError: if no further text could make it JSON.
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
