"""Answers that a grammar holds to be either calls or text, as a whole: how they begin decides."""

from collections.abc import Sequence

from master.api.answers.events import Piece
from master.api.tools.parser import NoTools, ToolParser


class EitherParser:
    """Calls, where it begins like one; else all of it is text, whatever stands in it."""

    def __init__(self, beginnings: Sequence[str], calls: ToolParser) -> None:
        """`beginnings`: of answers that `calls` is to read."""
        self._beginnings, self._calls = tuple(beginnings), calls
        self._held = ""
        self._inner: ToolParser | None = None  # who reads it, once that is known

    def push(self, text: str) -> list[Piece]:
        """See `master.api.tools.parser.ToolParser`."""
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
        """See `master.api.tools.parser.ToolParser`."""
        return NoTools().push(self._held) if self._inner is None else self._inner.flush()
