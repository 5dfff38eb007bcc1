"""A model's text on stdout: unchanged for files and pipes; filtered and wrapped between words for a terminal."""

import re
import sys

from master.reporting.output import at_terminal, write
from tpi.progress import line_is_begun
from tpi.text import harmless
from tpi.wrap import WordWrap, columns_of

_FENCE = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})")
_CODE = re.compile(r"(?: {4}|[ ]{0,3}\t)[ \t]*[^ \t\n]")
_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]")
_UNDECIDED = re.compile(r"[ \t]*(?:`{0,2}|~{0,2}|[-*+]|\d{1,3}[.)]?)| {0,3}(?:`{3}|~{3}).*")


class CodeLines:
    """Detector of code lines in Markdown: fenced, or indented by four characters after a blank line outside lists."""

    def __init__(self) -> None:
        self.inside = False  # True if the last line that began is code
        self._fence, self._list, self._blank, self._indented = "", False, True, False

    def undecided(self, line: str) -> bool:
        """Return True if `line`, which is incomplete, is too short to decide whether it is code."""
        return bool(_UNDECIDED.fullmatch(line))

    def begins(self, line: str) -> None:
        """Record the beginning of a line, long enough to decide, and return True if the line is code."""
        if self._fence:
            marks = line.strip()
            if len(marks) >= len(self._fence) and not marks.strip(self._fence[0]):
                self._fence = ""
            self.inside = True
            return
        if found := _FENCE.match(line):
            self._fence, self.inside, self._indented = found["fence"], True, False
            return
        self._indented = bool(_CODE.match(line)) and not self._list and (self._blank or self._indented)
        self.inside = self._indented
        if not line.strip():
            self._blank = True
            return
        self._list = bool(_ITEM.match(line)) or (self._list and (not self._blank or line[:1] in " \t"))
        self._blank = False


class AnswerWriter:
    """Writer of answers, one after another. It wraps prose but not code."""

    def __init__(self) -> None:
        self._begin()

    def write(self, text: str) -> None:
        """Write `text`, the next part of the answer. The errors are those of `master.reporting.output.write`."""
        if not at_terminal():
            write(text)
            return
        for piece in harmless(text).splitlines(keepends=True):
            self._line += piece
            if self._within or piece.endswith("\n") or not self._code.undecided(self._line):
                self._show()

    def resume(self, text: str) -> None:
        """Continue after `text`, which was shown before. If `text` ends within code, the continuation is code."""
        for line in harmless(text).splitlines():
            self._code.begins(line)

    def end(self) -> None:
        """Write the text held back, and prepare for the next answer. Call this when an answer ends or fails."""
        self._show()
        write("".join(part for part, _ in self._words.flush()))
        self._begin()

    def _begin(self) -> None:
        self._words = WordWrap[None](lambda: columns_of(sys.stdout))
        self._code, self._line, self._within = CodeLines(), "", False

    def _show(self) -> None:
        line, self._line = self._line, ""
        if not self._within and line:
            self._code.begins(line)
        if not line_is_begun():
            self._words.at_line_start()
        write("".join(part for part, _ in self._words.push(line, None, self._code.inside)))
        self._within = (self._within or bool(line)) and not line.endswith("\n")
