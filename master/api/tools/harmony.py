"""Answers in channels, as gpt-oss writes them: reasoning, tool calls, and text for the user."""

from master.api.answers.events import Piece, ReasoningPiece, TextPiece, ToolCall
from master.api.tools.parser import ToolParser, is_object
from master.text.channels import TOOL, Channels, ChannelText


class HarmonyParser:
    """A parser of channels.

    A message to a function is a call. Other text, except reasoning, goes to the parser `inner`.
    """

    def __init__(self, inner: ToolParser) -> None:
        self._inner, self._channels = inner, Channels()
        self._arguments = ""
        self.thinking = False  # the last part was reasoning

    def push(self, text: str) -> list[Piece]:
        """Parse more text; return the reasoning, plain text and complete calls that later text cannot change."""
        return [piece for part in self._channels.push(text) for piece in self._pieces(part)]

    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""
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
        """Add a part of a message to a function; return the call once it is complete.

        Arguments that are not a JSON object become text.
        """
        self._arguments += part.text
        if not part.ended:
            return []
        arguments, self._arguments = self._arguments.strip() or "{}", ""
        if not is_object(arguments):
            return [TextPiece(arguments)]
        return [ToolCall(part.to.removeprefix(TOOL), arguments)]
