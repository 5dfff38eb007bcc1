"""Input of a chat: a terminal with editing and history, a plain terminal, or a pipe."""

import os
import sys
from pathlib import Path
from typing import BinaryIO, Protocol

import click

from master.text.prompts import MOST_BYTES, checked_text, decoded
from tpi.errors import UsageError
from tpi.system.streams import unfiltered

PROMPT = "> "
CONTINUED = "\\"  # at the end of a line: the message continues on the next line


class Reader(Protocol):
    """A source of the user's messages."""

    interactive: bool  # True at a terminal: errors are printed, and the chat continues

    def read(self) -> str | None:
        """Return the next message; None at the end of input.

        Raises:
            KeyboardInterrupt: if the user pressed Ctrl-C while this waited.
            UsageError: if the message is not UTF-8, or too long.
        """


class PlainReader:
    """Reader of lines from a pipe, or from a terminal that edits lines itself."""

    def __init__(self, file: BinaryIO, interactive: bool) -> None:
        self.interactive = interactive
        self._file = file

    def read(self) -> str | None:
        """Return one message: a line, with the further lines that backslashes at line ends join to it."""
        parts: list[str] = []
        while True:
            if self.interactive:
                click.echo(PROMPT, nl=False, err=True)
            line = self._file.readline(MOST_BYTES)
            if not line:
                return "\n".join(parts) if parts else None
            if not line.endswith(b"\n") and len(line) == MOST_BYTES:
                raise UsageError(f"a line has more than {MOST_BYTES >> 20} MiB, too much for a prompt; shorten it")
            text = checked_text(decoded(line, "what was typed"), "what was typed").rstrip("\r\n")
            if not text.endswith(CONTINUED):
                return "\n".join([*parts, text])
            parts.append(text.removesuffix(CONTINUED))


def open_reader(history: Path | None) -> Reader:
    """Return the best reader for this terminal or pipe. `history` is the file of earlier lines, or None.

    Raises:
        UsageError: if standard input is closed.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed, so a chat cannot read messages; use tpi run")
    interactive = sys.stdin.isatty()
    screen = next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)
    if not interactive or screen is None or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return PlainReader(sys.stdin.buffer, interactive)
    from master.chat.editor import Editor  # prompt_toolkit is loaded only when it is used

    return Editor(unfiltered(screen), history)  # prompt_toolkit writes control sequences
