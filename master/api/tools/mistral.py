"""Mistral's calls after a marker: an array of objects, or since 2025 `NAME[ARGS]{...}` or `NAME{...}` for each."""

import re
from collections.abc import Sequence

from master.api.answers.events import Piece, TextPiece, ToolCall
from master.api.tools.parser import calls_in, is_object
from master.api.tools.scan import JsonEnd, held_back

MARKER = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser:
    """A parser of text up to a marker and then calls. If a call cannot be read, the rest is text."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._text = ""
        self._marked = self._called = self._plain = False

    def push(self, text: str) -> list[Piece]:
        """Take in more text; return the texts and calls that are certain by now."""
        self._text += text
        before = ""
        if not self._marked and not self._plain:
            found = self._text.find(MARKER)
            end = found if found >= 0 else len(self._text) - held_back(self._text, [MARKER])
            before, self._text = self._text[:end], self._text[end:]
            if found < 0:
                return _plain(before)
            self._marked, self._text = True, self._text[len(MARKER) :]
        pieces = _plain(before)
        while not self._plain and (calls := self._next()) is not None:
            pieces += calls
        return pieces + (self._rest() if self._plain else [])

    def flush(self) -> list[Piece]:
        """Return what was held back, at the end of the answer."""
        if self._called and not self._text.strip():
            return []
        return self._rest()

    def _next(self) -> list[Piece] | None:
        """Return the next calls; None if more text is needed, or if it is not a call."""
        text = (self._text.removeprefix(MARKER) if self._called else self._text).lstrip()
        named = _NAMED.match(text)
        start = named.end() if named else 0
        if not text[start:].startswith(("{", "[")) or (length := JsonEnd().feed(text[start:])) is None:
            return None
        body = text[start : start + length]
        calls = self._named(named[1], body) if named else calls_in(body, self._names)
        if calls is None:
            self._plain = True
        else:
            self._text, self._called = text[start + length :], True
        return calls

    def _named(self, name: str, body: str) -> list[Piece] | None:
        offered = not self._names or name in self._names
        return [ToolCall(name, body)] if offered and is_object(body) else None

    def _rest(self) -> list[Piece]:
        """Return the text that was held back, as the model wrote it."""
        rest = (MARKER if self._marked and not self._called else "") + self._text
        self._text, self._marked = "", False
        return _plain(rest)


def _plain(text: str) -> list[Piece]:
    return [TextPiece(text)] if text else []
