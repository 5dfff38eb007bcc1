"""Where a chat's answers go: a terminal that shows Markdown, or anything else, which gets them as they are."""

import os
from typing import Protocol

from master.reporting.output import at_terminal, write
from master.reporting.prose import AnswerWriter


class Screen(Protocol):
    """What shows one answer after another."""

    def write(self, text: str) -> None:
        """More of the answer. Errors as `master.reporting.output.write`."""

    def resume(self, text: str) -> None:
        """The next answer goes on after `text`, which was shown before."""

    def end(self) -> None:
        """The answer is over, or broke off."""


def open_screen(markdown: bool) -> Screen:
    """The best that stdout can show; a file or a pipe, or a terminal that can do nothing, gets plain text."""
    if not (markdown and at_terminal()) or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return AnswerWriter()
    from master.chat.showing.markdown import MarkdownScreen  # rich is loaded for a terminal alone
    from tpi.console import SafeConsole

    console = SafeConsole(stderr=False)
    return MarkdownScreen(write, console, lambda: console.columns)
