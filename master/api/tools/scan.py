"""Search in text that comes in pieces: for markers, and for the end of a JSON value."""

from collections.abc import Sequence

_OPENING, _CLOSING = "{[", "}]"


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` that `text` ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `markers`."""
    return max((overlap(text, marker) for marker in markers), default=0)


class JsonEnd:
    """Finds the end of an object or array that comes in pieces. Feed it from the first character of the value."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the number of characters of `text` that belong to the value; None if its end has not come yet."""
        for index, character in enumerate(text):
            if self._quoted:
                self._in_string(character)
            elif character == '"':
                self._quoted = True
            elif character in _OPENING:
                self._depth += 1
            elif character in _CLOSING:
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
