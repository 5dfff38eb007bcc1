"""The text of an answer with thinking that comes separately: thinking between tags, then the answer."""

OPENING, CLOSING = "<think>\n", "\n</think>\n\n"


class ShownThoughts:
    """The text of one answer, as it comes; `said` is the text without the thinking."""

    def __init__(self) -> None:
        self.said = ""
        self._thinking = False

    def think(self, text: str) -> str:
        """Return the text to show for more of the thinking."""
        opening = OPENING if text and not self._thinking else ""
        self._thinking = self._thinking or bool(text)
        return opening + text

    def say(self, text: str) -> str:
        """Return the text to show for more of the answer."""
        self.said += text
        return self.flush() + text if text else ""

    def flush(self) -> str:
        """Return the text to show when the thinking has ended."""
        closing, self._thinking = CLOSING if self._thinking else "", False
        return closing
