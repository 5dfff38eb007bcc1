"""Calls between markers: Hermes and Qwen, `<tool_call>{...}</tool_call>`; Llama's `<function=NAME>{...}</function>`."""

from collections.abc import Sequence

from master.api.answers.events import Piece, TextPiece, ToolCall
from master.api.tools.parser import calls_in, is_object
from master.api.tools.scan import held_back

HERMES = ("<tool_call>", "</tool_call>")
FUNCTION = ("<function=", "</function>")


class MarkedParser:
    """A parser of text followed by calls, each between an opening and a closing marker.

    White space around calls is dropped.
    """

    def __init__(self, markers: tuple[str, str], names: Sequence[str]) -> None:
        self._open, self._close = markers
        self._names = names
        self._text = ""
        self._inside = self._called = False

    def push(self, text: str) -> list[Piece]:
        """Take in more text; return the texts and calls that are certain by now."""
        self._text += text
        pieces: list[Piece] = []
        while (found := self._text.find(self._close if self._inside else self._open)) >= 0:
            before = self._text[:found]
            if self._inside:
                self._text = self._text[found + len(self._close) :]
                pieces += self._calls(before, self._close)
            else:
                self._text = self._text[found + len(self._open) :]
                pieces += self._plain(before.rstrip())
            self._inside = not self._inside
        if not self._inside:
            keep = self._kept()
            pieces += self._plain(self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
        return pieces

    def flush(self) -> list[Piece]:
        """Return what was held back, at the end of the answer.

        A complete call without its closing marker is accepted.
        """
        rest, self._text = self._text, ""
        if self._inside:
            self._inside = False
            return self._calls(rest, "")
        return self._plain(rest)

    def _kept(self) -> int:
        """Return the length of the end that may become a marker, and of the white space before it."""
        marker = held_back(self._text, [self._open])
        before = self._text[: len(self._text) - marker]
        return marker + len(before) - len(before.rstrip())

    def _plain(self, text: str) -> list[Piece]:
        if self._called and not text.strip():
            return []
        return [TextPiece(text)] if text else []

    def _calls(self, inside: str, close: str) -> list[Piece]:
        calls = self._named(inside) if self._open == FUNCTION[0] else calls_in(inside, self._names)
        if calls is None:
            return [TextPiece(self._open + inside + close)]
        self._called = True
        return calls

    def _named(self, inside: str) -> list[Piece] | None:
        """Return the call in `NAME>{...}`; None if it is not one."""
        name, _, arguments = inside.partition(">")
        offered = not self._names or name in self._names
        return [ToolCall(name, arguments.strip())] if offered and is_object(arguments) else None
