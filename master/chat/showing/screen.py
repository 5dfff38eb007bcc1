"""The output of a chat's answers: a terminal that shows Markdown, or plain text anywhere else."""

import os
from typing import Protocol

from master.reporting.output import at_terminal, write
from master.reporting.prose import AnswerWriter


class Screen(Protocol):
    """A display of one answer after another."""

    def write(self, text: str) -> None:
        """Show `text`, the next part of the answer. The errors are those of `master.reporting.output.write`."""

    def resume(self, text: str) -> None:
        """Prepare to continue an answer whose `text` was shown before."""

    def end(self) -> None:
        """Show the text held back; call this when the answer has ended or failed."""


def open_screen(markdown: bool) -> Screen:
    """Return the best display for stdout; files, pipes and dumb terminals get plain text."""
    if not (markdown and at_terminal()) or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return AnswerWriter()
    from master.chat.showing.markdown import MarkdownScreen  # rich is loaded only for a terminal
    from tpi.console import SafeConsole

    console = SafeConsole(stderr=False)
    return MarkdownScreen(write, console, lambda: console.columns)
