"""Reasoning of a model between tags, before its answer: it is separated from the answer."""

from master.api.answers.events import Piece, ReasoningPiece
from master.api.tools.parser import ToolParser
from master.api.tools.scan import held_back

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<thought>", "</thought>"),
)
"""Tags around reasoning. A template may contain only the second, to remove reasoning from earlier answers."""


class ReasoningParser:
    """A parser that separates reasoning at the start of an answer from the rest, which `inner` parses."""

    def __init__(self, tags: tuple[str, str], begun: bool, inner: ToolParser) -> None:
        """Create a parser. With `begun`, the prompt ends with the opening tag, so the answer begins inside the
        reasoning.
        """
        self._open, self._close = tags
        self._inner = inner
        self._text = ""
        self._begun, self._over = begun, False
        self._fresh = True  # True until text of the present part was returned; line ends at its beginning are dropped

    def push(self, text: str) -> list[Piece]:
        """Parse more text; return the reasoning, plain text and complete calls that later text cannot change."""
        if self._over:
            return self._answer(text)
        self._text += text
        if not self._begun:
            begins = self._text.lstrip()
            if self._open.startswith(begins) and begins != self._open:
                return []
            if not begins.startswith(self._open):
                self._over, self._fresh, rest, self._text = True, False, self._text, ""
                return self._inner.push(rest)
            self._begun, self._text = True, begins[len(self._open) :]
        return self._think()

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""
        rest, self._text = self._text, ""
        if self._over:
            return self._inner.flush()
        if self._begun:
            return self._thought(rest.rstrip())
        return self._inner.push(rest) + self._inner.flush()

    def _think(self) -> list[Piece]:
        end = self._text.find(self._close)
        if end < 0:
            shown = self._text[: len(self._text) - held_back(self._text, [self._close])].rstrip()
            self._text = self._text[len(shown) :]
            return self._thought(shown)
        thought, rest = self._text[:end].rstrip(), self._text[end + len(self._close) :]
        pieces = self._thought(thought)
        self._over, self._fresh, self._text = True, True, ""
        return pieces + self._answer(rest)

    def _thought(self, text: str) -> list[Piece]:
        text = text.lstrip("\n") if self._fresh else text
        self._fresh = self._fresh and not text
        return [ReasoningPiece(text)] if text else []

    def _answer(self, text: str) -> list[Piece]:
        text = text.lstrip("\n") if self._fresh else text
        self._fresh = self._fresh and not text
        return self._inner.push(text)
