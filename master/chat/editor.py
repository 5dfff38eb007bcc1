"""Line editing with history, by prompt_toolkit."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.data_structures import Size
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output

from master.chat.readers import CONTINUED, PROMPT
from master.text.prompts import checked_text
from tpi.system.private import make_private

_MOST_HISTORY = 1 << 20  # bytes of history; if a chat begins with more, the older half is dropped


class Editor:
    """A prompt on the terminal `screen`. Enter sends; Alt-Enter, or a backslash before Enter, begins a new line."""

    interactive = True

    def __init__(self, screen: TextIO, history: Path | None) -> None:
        output = Vt100_Output(screen, lambda: _size(screen), term=os.environ.get("TERM"), enable_cpr=False)
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=" " * len(PROMPT),
            key_bindings=_keys(),
            history=_history(history),
            enable_suspend=True,
            reserve_space_for_menu=0,
            output=output,
        )

    def read(self) -> str | None:
        """Return one message, of one or several lines; None at the end of input."""
        try:
            return checked_text(self._session.prompt(), "what was typed")
        except EOFError:
            return None


def _size(screen: TextIO) -> Size:
    """Return the terminal's size; 24 rows and 80 columns if the terminal does not report a size."""
    columns, rows = os.get_terminal_size(screen.fileno())
    return Size(rows or 24, columns or 80)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUED):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path | None) -> History:
    """Return the lines of earlier chats, from a file that only its owner can read.

    If the file cannot be used, or there is none, the history has only this chat's lines.
    """
    if path is None:
        return InMemoryHistory()
    try:
        make_private(path.parent)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            _shorten(file.fileno())
    except OSError:
        return InMemoryHistory()
    return _Kept(str(path))


class _Kept(FileHistory):
    """A history file of prompt_toolkit. If the disk is full, new lines are stored for this chat only."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _shorten(file: int) -> None:
    """Drop the older half of a history file that is too long; an empty line precedes each entry."""
    size = os.fstat(file).st_size
    if size > _MOST_HISTORY:
        newer = os.pread(file, _MOST_HISTORY // 2, size - _MOST_HISTORY // 2)
        newer = newer[newer.find(b"\n\n") + 1 :]
        os.ftruncate(file, 0)
        os.pwrite(file, newer, 0)
