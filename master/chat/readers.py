"""Where a chat's lines come from: a terminal with editing and history, a plain one, or a pipe."""

import os
import sys
from pathlib import Path
from typing import BinaryIO, Protocol

import click

from master.text.prompts import MOST_BYTES, checked_text, decoded
from tpi.errors import UsageError
from tpi.system.streams import unfiltered

PROMPT = "> "
CONTINUED = "\\"  # at the end of a line: the next one belongs to it


class Reader(Protocol):
    """What the user says, one message at a time."""

    interactive: bool  # a person is there: errors are said, and the chat goes on

    def read(self) -> str | None:
        """The next message, None at the end.

        Raises:
            KeyboardInterrupt: if the user pressed Ctrl-C meanwhile.
            UsageError: if it is not UTF-8, or too long.
        """


class PlainReader:
    """Lines of a file: a pipe, or a terminal that edits lines itself."""

    def __init__(self, file: BinaryIO, interactive: bool) -> None:
        self.interactive = interactive
        self._file = file

    def read(self) -> str | None:
        """One line, with those that its last backslash joins to it."""
        parts: list[str] = []
        while True:
            if self.interactive:
                click.echo(PROMPT, nl=False, err=True)
            line = self._file.readline(MOST_BYTES)
            if not line:
                return "\n".join(parts) if parts else None
            if not line.endswith(b"\n") and len(line) == MOST_BYTES:
                raise UsageError(
                    f"a line has more than {MOST_BYTES >> 20} MiB, too much for a prompt; say less at once"
                )
            text = checked_text(decoded(line, "what was typed"), "what was typed").rstrip("\r\n")
            if not text.endswith(CONTINUED):
                return "\n".join([*parts, text])
            parts.append(text.removesuffix(CONTINUED))


def open_reader(history: Path | None) -> Reader:
    """The best reader for this terminal or pipe; lines are remembered in the file `history`, if there is one."""
    if sys.stdin is None:
        raise UsageError("standard input is closed, so a chat cannot read messages; use tpi run")
    interactive = sys.stdin.isatty()
    screen = next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)
    if not interactive or screen is None or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return PlainReader(sys.stdin.buffer, interactive)
    from master.chat.editor import Editor  # prompt_toolkit is loaded for those who see it

    return Editor(unfiltered(screen), history)  # which sends the terminal its sequences
