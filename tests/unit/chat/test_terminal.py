"""What a model writes does nothing to the terminal that shows it; files and pipes get it."""

import io
import sys

import pytest

from master.chat.showing.screen import open_screen
from master.reporting.output import write_answer

WRITTEN = "a\x1b]0;title\x07b\tc\x9b31m\x7fd\n"


class Shown(io.StringIO):
    """A stdout that is a terminal, or is not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("terminal", "seen"), [(True, "a]0;titleb\tc31md\n"), (False, WRITTEN)])
def test_a_terminal_gets_no_control_characters(
    chat: bool, terminal: bool, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = Shown(terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "dumb")
    (open_screen(markdown=True).write if chat else write_answer)(WRITTEN)
    assert stdout.getvalue() == seen
