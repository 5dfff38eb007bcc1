"""Display of an answer's Markdown at a terminal, as it comes.

Text that was shown is never redrawn, so scrolling, resizing and other output cannot damage it. A line is begun as soon
as its kind is clear; only tables wait until they are complete.
"""

import re
from collections.abc import Callable

from rich.console import Console
from rich.markdown import Markdown

from master.chat.showing.spans import LineSpans
from master.reporting.prose import CodeLines
from tpi.progress import line_is_begun
from tpi.text import harmless
from tpi.wrap import WordWrap

_STYLES = {
    "bold": "bold", "italic": "italic", "strike": "strike", "code": "cyan", "link": "underline", "heading": "bold",
    "quote": "italic", "quiet": "dim",
}  # fmt: skip
_FENCE = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<name>[^`]*)")
_RULE = re.compile(r" {0,3}([-*_])[ \t]*(\1[ \t]*){2,}")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+")
_QUOTE = re.compile(r" {0,3}> ?")
_ITEM = re.compile(r"(?P<before>[ \t]*)[-*+][ \t]+")
_ROW = re.compile(r" {0,3}\|.*")
_DIVIDER = re.compile(r" {0,3}\|[ \t:|-]*-[ \t:|-]*")
_UNDECIDED = re.compile(r"[ \t]*(#{0,6}[ \t]*|[-*_+][-*_+ \t]*|>|`{0,2}|```.*|~{0,2}|~~~.*|\|.*)")
"""Beginnings of a line that may still become a heading, an item, a rule, a quote, a fence or a row."""
_TABS = re.compile(r"(\t)")
_RULE_WIDTH = 40


class MarkdownScreen:
    """A display that styles the Markdown of answers, one answer after another."""

    def __init__(self, write: Callable[[str], None], console: Console, columns: Callable[[], int] = lambda: 0) -> None:
        """Create a screen that passes its text to `write`, wrapped at `columns()` unless that is 0.

        `console` knows the terminal's colours.
        """
        self._write, self._console = write, console
        self._rest = ""  # text of a line, not shown yet
        self._begun: LineSpans | None = None  # the line of which a part is shown
        self._style = ""  # style of the whole line
        self._fence = ""  # the marks that opened the present code block
        self._table: list[str] = []
        self._code = CodeLines()  # state of indented code
        self._words = WordWrap[str](columns)

    def write(self, text: str) -> None:
        """Show `text`, the next part of the answer."""
        self._rest += harmless(text)
        while "\n" in self._rest:
            line, _, self._rest = self._rest.partition("\n")
            self._finish(line)
        if self._rest and (self._begun or not self._undecided(self._rest)):
            self._show(self._rest, over=False)
            self._rest = ""

    def resume(self, text: str) -> None:
        """Parse the shown `text` of an answer that is continued, so that an open code block continues as code."""
        write, self._write = self._write, lambda _: None
        try:
            self.write(text)
        finally:
            self._write, self._rest = write, ""
            self._words.at_line_start()

    def end(self) -> None:
        """Show the text held back, and prepare for the next answer."""
        if self._rest or self._begun:
            self._finish(self._rest)
        self._end_table()
        self._put("", "", flush=True)
        self._rest = self._fence = ""
        self._code = CodeLines()

    def _undecided(self, line: str) -> bool:
        """Return True if the line is too short to decide whether it is, for example, a heading or a list item."""
        if self._fence:
            return not line.strip().strip(self._fence[0])
        return bool(_UNDECIDED.fullmatch(line))

    def _finish(self, line: str) -> None:
        """Show the rest of a line, which ends now."""
        if self._begun or not self._take_whole(line):
            self._show(line, over=True)
            self._put("\n", "")
            self._begun = None

    def _take_whole(self, line: str) -> bool:
        """Take a line of a kind that is shown only when it is complete: a fence, a rule or a table row.

        Return False for lines of other kinds.
        """
        if self._fence:
            closes = len(line.strip()) >= len(self._fence) and not line.strip().strip(self._fence[0])
            self._fence = "" if closes else self._fence
            return closes
        if _ROW.fullmatch(line):
            self._table.append(line)
            return True
        self._end_table()
        if fence := _FENCE.fullmatch(line):
            self._fence = fence["fence"]
            self._put(f"{fence['name'].strip() or 'code'}\n", "quiet")
        elif _RULE.fullmatch(line):
            self._put("\u2500" * _RULE_WIDTH + "\n", "quiet")
        return bool(fence or _RULE.fullmatch(line))

    def _show(self, text: str, over: bool) -> None:
        """Show the next piece of a line. `over` is True if the line ends with the piece."""
        if self._begun is None:
            self._begun = LineSpans()
            text = self._begin(text)
        if self._fence:
            self._put(text, "code")
            return
        for span in self._begun.push(text, over):
            self._put(span.text, f"{self._style} {span.style}")

    def _begin(self, text: str) -> str:
        """Set the style of a line by its beginning; return the text without the mark of its kind."""
        self._style = ""
        if self._fence:
            return text
        self._code.begins(text)
        self._end_table()
        if found := _HEADING.match(text):
            self._style = "heading"
        elif found := _QUOTE.match(text):
            self._style = "quote"
            self._put("\u2502 ", "quiet")
        elif found := _ITEM.match(text):
            self._put(f"{found['before']}\u2022 ", "quiet")
        return text[found.end() :] if found else text

    def _end_table(self) -> None:
        rows, self._table = self._table, []
        if len(rows) > 1 and _DIVIDER.fullmatch(rows[1]):
            with self._console.capture() as shown:
                self._console.print(Markdown("\n".join(rows), hyperlinks=False))
            self._write(shown.get())
            return
        for row in rows:
            for span in LineSpans().push(row, over=True):
                self._put(span.text, span.style)
            self._put("\n", "")

    def _put(self, text: str, styles: str, flush: bool = False) -> None:
        """Show text in all of `styles`, which are names of `_STYLES`; words are wrapped unless the text is code."""
        if not line_is_begun():
            self._words.at_line_start()
        for part, styled in self._words.push(text, styles, verbatim=bool(self._fence) or self._code.inside):
            self._paint(part, styled)
        for part, styled in self._words.flush() if flush else ():
            self._paint(part, styled)

    def _paint(self, text: str, styles: str) -> None:
        style = " ".join(_STYLES[name] for name in styles.split())
        for part in _TABS.split(
            text
        ):  # only the terminal knows the width of a tab: rich counts from the beginning of the piece
            with self._console.capture() as shown:
                self._console.out(part, style=style or None, highlight=False, end="")
            self._write(shown.get() if style and part != "\t" else part)
