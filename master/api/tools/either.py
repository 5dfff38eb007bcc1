"""Answers that a grammar restricts to either calls or text: the beginning decides which."""

from collections.abc import Sequence

from master.api.answers.events import Piece
from master.api.tools.parser import NoTools, ToolParser


class CallsOrTextParser:
    """A parser that reads the answer as calls if it begins like one, and otherwise as plain text to its end."""

    def __init__(self, beginnings: Sequence[str], calls: ToolParser) -> None:
        """Create a parser. An answer that begins with one of `beginnings` goes to the parser `calls`."""
        self._beginnings, self._calls = tuple(beginnings), calls
        self._held = ""
        self._inner: ToolParser | None = None  # the parser of the answer, once that is decided

    def push(self, text: str) -> list[Piece]:
        """Parse more text; return the plain text and the complete calls that later text cannot change."""
        if self._inner is not None:
            return self._inner.push(text)
        self._held += text
        if self._held.startswith(self._beginnings):
            self._inner = self._calls
        elif any(one.startswith(self._held) for one in self._beginnings):
            return []
        else:
            self._inner = NoTools()
        return self._inner.push(self._held)

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""
        return NoTools().push(self._held) if self._inner is None else self._inner.flush()
