"""Answers in channels, as gpt-oss writes them: thinking, calls of tools, and what the user is told."""

from master.api.answers.events import Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.tools.parser import ToolParser, is_object
from master.text.channels import TOOL, Channels, ChannelText


class HarmonyParser:
    """Thinking is reasoning, what is said to a function is a call of it, and the rest is what `inner` makes of it."""

    def __init__(self, inner: ToolParser) -> None:
        self._inner, self._channels = inner, Channels()
        self._arguments = ""
        self.thinking = False  # whether the last that came was thinking

    def push(self, text: str) -> list[Piece]:
        """See `master.api.tools.parser.ToolParser`."""
        return [piece for part in self._channels.push(text) for piece in self._pieces(part)]

    def flush(self) -> list[Piece]:
        """See `master.api.tools.parser.ToolParser`."""
        rest = [piece for part in self._channels.flush() for piece in self._pieces(part)]
        return rest + self._inner.flush()

    def _pieces(self, part: ChannelText) -> list[Piece]:
        self.thinking = part.thought
        if part.to.startswith(TOOL):
            return self._call(part)
        if not part.text:
            return []
        return [ReasoningPiece(part.text)] if part.thought else self._inner.push(part.text)

    def _call(self, part: ChannelText) -> list[Piece]:
        """A call, once it is whole; what is no object of arguments is text."""
        self._arguments += part.text
        if not part.ended:
            return []
        arguments, self._arguments = self._arguments.strip() or "{}", ""
        if not is_object(arguments):
            return [TextPiece(arguments)]
        return [ToolCall(part.to.removeprefix(TOOL), arguments)]
