"""A model's text cannot control the terminal that shows it; files and pipes get the text as it is."""

import io
import re
import sys
from itertools import count

import pytest

from master.chat.showing.screen import open_screen
from master.reporting.prose import AnswerWriter
from tpi.progress import phase, warn

WRITTEN = "a\x1b]0;title\x07b\tc\x9b31m\x7fd\n"


class Shown(io.StringIO):
    """A stdout that is a terminal, or is not one."""

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
    (open_screen(markdown=True) if chat else AnswerWriter()).write(WRITTEN)
    assert stdout.getvalue() == seen


@pytest.mark.parametrize("markdown", [False, True])
def test_a_warning_within_an_answer_has_a_line_of_its_own(markdown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Shown(True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm" if markdown else "dumb")
    screen = open_screen(markdown=True)
    screen.write("Once upon")
    warn("one is lost")
    warn("two is lost")
    screen.write(" a **time** x\n# End\n")
    warn("three is lost")
    screen.end()
    warn("four is lost")
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    told = [f"tpi: {number} is lost" for number in ("one", "two", "three", "four")]
    assert [line for line in lines if line in told] == told
    assert len(lines) == 7
    assert "" not in lines
    assert lines[0] == "Once upon"


def test_a_warning_ends_no_line_of_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for answers, warnings in ((Shown(True), Shown(False)), (Shown(False), Shown(True))):
        monkeypatch.setattr(sys, "stdout", answers)
        monkeypatch.setattr(sys, "stderr", warnings)
        AnswerWriter().write("Once upon")
        warn("one is lost")
        assert warnings.getvalue() == "tpi: one is lost\n"


def test_neither_does_progress_go_on_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Shown(True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("tpi.progress.monotonic", count(0, 2).__next__)
    AnswerWriter().write("Once upon")
    with phase("waiting"):
        pass
    assert terminal.getvalue() == "Once upon\nwaiting: 2.0 s\n"
