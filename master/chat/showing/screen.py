"""Where a chat's answers go: a terminal that shows Markdown, or anything else, which gets them as they are."""

import os
import sys
import unicodedata
from typing import Protocol

from master.reporting.output import write


class Screen(Protocol):
    """What shows one answer after another."""

    def write(self, text: str) -> None:
        """More of the answer. Errors as `master.reporting.output.write`."""

    def end(self) -> None:
        """The answer is over, or broke off."""


class PlainScreen:
    """Text as the model wrote it; at a terminal without control characters, which could do anything to it."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal

    def write(self, text: str) -> None:
        """See `Screen`."""
        write(harmless(text) if self._terminal else text)

    def end(self) -> None:
        """See `Screen`."""


def harmless(text: str) -> str:
    """`text` without control characters, but for tabs and line ends."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")


def open_screen(markdown: bool) -> Screen:
    """The best that stdout can show; a file or a pipe, or a terminal that can do nothing, gets plain text."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if not (markdown and terminal) or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return PlainScreen(terminal)
    from rich.console import Console  # loaded for those who see it

    from master.chat.showing.markdown import MarkdownScreen

    return MarkdownScreen(write, Console(highlight=False))
