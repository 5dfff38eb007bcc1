"""Calls that are the whole answer, as JSON objects, perhaps after a tag (Llama 3) or in a code fence."""

import re
from collections.abc import Sequence

from master.api.answers.events import Piece, TextPiece
from master.api.tools.parser import calls_in
from master.api.tools.scan import json_end

PYTHON_TAG = "<|python_tag|>"
TOOL_CALL, TOOL_CALL_END = "<|tool_call|>", "<|/tool_call|>"  # markers of Phi-4 mini
_OPENINGS = (PYTHON_TAG, TOOL_CALL, "functools")  # texts before the JSON of calls
_FENCE = re.compile(r"```(?:json)?\s*\n?")
_BEGINNINGS = ("{", "[", *_OPENINGS, "```json", "```\n")
_BETWEEN = " \t\r\n;,`"


class BareParser:
    """A parser that holds back JSON until a value is complete.

    If the answer does not begin like JSON, all of it is plain text.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._raw = ""  # text held back
        self._plain = self._called = False

    def push(self, text: str) -> list[Piece]:
        """Parse more text; return the plain text and the complete calls that later text cannot change."""
        if self._plain:
            return [TextPiece(text)] if text else []
        self._raw += text
        pieces: list[Piece] = []
        while not self._plain and (found := self._next()) is not None:
            pieces += found
        return pieces

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""
        rest, self._raw = self._raw, ""
        ended = self._called and not rest.replace(TOOL_CALL_END, "").strip(_BETWEEN)
        return [] if not rest or ended else [TextPiece(rest)]

    def _next(self) -> list[Piece] | None:
        """Return the next calls; the remaining text if it cannot be a call; None if more text is needed."""
        held = self._raw.lstrip(_BETWEEN if self._called else None)
        if self._called:
            held = held.removeprefix(TOOL_CALL_END).lstrip(_BETWEEN)
        awaited = (*_BEGINNINGS, TOOL_CALL_END) if self._called else _BEGINNINGS
        if not held or any(one.startswith(held) and one != held for one in awaited):
            return None
        opening = next((one for one in _OPENINGS if held.startswith(one)), "")
        body = held.removeprefix(opening).lstrip()
        if fence := _FENCE.match(body):
            body = body[fence.end() :]
        if not body:
            return None
        if not held.startswith(_BEGINNINGS) or not body.startswith(("{", "[")):
            return self._all_text()
        try:
            length = json_end(body, 0)
        except ValueError:
            return self._all_text()
        if length is None:
            return None
        calls = calls_in(body[:length], self._names)
        if calls is None:
            return self._all_text()
        self._called, self._raw = True, body[length:]
        return calls

    def _all_text(self) -> list[Piece]:
        self._plain = True
        rest, self._raw = self._raw, ""
        return [TextPiece(rest)]
