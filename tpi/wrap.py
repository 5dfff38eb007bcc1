"""Word wrapping at the edge of a terminal, for text that arrives in pieces. Text that was shown is never changed."""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import IO, Generic, TypeVar

Style = TypeVar("Style")

_PARTS = re.compile(r"\n|[ \t\u200b]+|[^\n \t\u200b]+")
_MARKER = re.compile(r"[-*+•│]|\d{1,3}[.)]")  # marker of a list item, whose further lines are indented
_CLOSING = ("Pe", "Pf", "Po", "Lm")  # categories of characters that must not begin a line
_TAB = 8


def character_width(one: str) -> int:
    """Return the columns that a character takes: 0, 1 or 2."""
    if one < "\u0300":
        return 1
    if unicodedata.category(one) in ("Mn", "Me", "Cf") or "\u1160" <= one <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(one) in ("W", "F") else 1


def _stays(one: str) -> bool:
    """Return True if no line may break before the character `one`: it is a closing mark or a small kana."""
    return unicodedata.category(one) in _CLOSING or " SMALL " in unicodedata.name(one, "")


def text_width(text: str) -> int:
    """Return the columns that `text` takes. It must not contain tabs or line ends."""
    return len(text) if text.isascii() else sum(map(character_width, text))


def columns_of(stream: IO[str]) -> int:
    """Return the columns of the terminal that `stream` writes to; 0 if it is not a terminal or its width is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


class WordWrap(Generic[Style]):
    """A filter that breaks lines between words.

    Each piece of text has a style, which is handed on; a word may have several.

    A word is held back until it is complete, or longer than a line. `column` is the position of the next character.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        """Create a filter for a terminal of `width()` columns; 0 means that nothing is wrapped.

        `width` is called each time, because the terminal may be resized.
        """
        self.column = 0
        self._width = width
        self._gap: list[tuple[str, Style]] = []  # white space before the word
        self._word: list[tuple[str, Style]] = []
        self._taken = 0  # columns of the word
        self._words = 0  # words in this line so far
        self._hang = 0  # indentation of continuation lines, in columns
        self._marked = False  # the first word is the marker of a list item
        self._long = False  # within a word that is longer than a line

    def push(self, text: str, style: Style, verbatim: bool = False) -> Iterator[tuple[str, Style]]:
        """Add `text`, and yield the text that can be shown now, each piece with its style.

        `verbatim` text, such as code, is not wrapped.
        """
        if verbatim or not self._width():
            yield from self.flush()
            if text:
                yield text, style
                self._count(text)
            return
        for part in _PARTS.findall(text):
            if part == "\n":
                yield from self.flush()
                yield part, style
                self._count(part)
            elif part[0] in " \t\u200b":
                yield from self._place()
                self._gap.append((part, style))
            else:
                yield from self._spell(part, style)

    def flush(self) -> Iterator[tuple[str, Style]]:
        """Yield the text that `push` held back, because its last word was not complete."""
        yield from self._place()
        gap, self._gap = self._gap, []
        for text, _ in gap:
            self._count(text)
        yield from gap

    def at_line_start(self) -> None:
        """Continue on a new line, because something else was written to the terminal."""
        self.column = self._hang = 0

    def _spell(self, part: str, style: Style) -> Iterator[tuple[str, Style]]:
        """Add a part of a word, and yield what can be shown already.

        A line may break before and after a wide character.
        """
        begin, wide = 0, False
        if not part.isascii():
            for at, one in enumerate(part):
                now = character_width(one)
                if (now == 2 or wide) and now and not _stays(one):
                    yield from self._add(part[begin:at], style)
                    yield from self._place()
                    begin = at
                wide = now == 2 if now else wide
        yield from self._add(part[begin:], style)

    def _add(self, text: str, style: Style) -> Iterator[tuple[str, Style]]:
        if not text:
            return
        self._word.append((text, style))
        self._taken += text_width(text)
        if self._long or self._taken > self._width():
            yield from self._place()
            self._long = True

    def _place(self) -> Iterator[tuple[str, Style]]:
        """Yield the completed word, for this line if the word fits, or else for the next one."""
        word, gap, taken, long = self._word, self._gap, self._taken, self._long
        self._long = False
        if not word:
            return
        self._word, self._gap, self._taken = [], [], 0
        width, column = self._width(), self.column
        end = _after("".join(text for text, _ in gap), column)
        if end + taken > width > 0 and column > self._hang and not long:
            yield "\n" + " " * self._hang, word[0][1]
            self.column = self._hang
        else:
            yield from gap
            self.column = end
            self._begin_word("".join(text for text, _ in word))
        self._words += 1
        yield from word
        self._move(taken)

    def _begin_word(self, text: str) -> None:
        """Set the indentation of continuation lines, which depends on how the line begins.

        If the first word is a list marker, continuation lines begin below the second word.
        """
        if self._words == 0:
            self._marked = bool(_MARKER.fullmatch(text))
            self._hang = self._bounded(self.column)
        elif self._words == 1 and self._marked:
            self._hang = self._bounded(self.column)

    def _bounded(self, column: int) -> int:
        return column if column <= self._width() // 2 else 0

    def _count(self, text: str) -> None:
        """Advance the position past `text`, which was shown unchanged."""
        line = text.rpartition("\n")[2]
        if "\n" in text:
            self.column = self._words = self._hang = 0
        if line:
            self._words += bool(line.strip())
            self.column = _after(line, self.column)
            self._move(0)

    def _move(self, columns: int) -> None:
        """Advance the position by `columns`. Beyond the edge of the terminal, text continues on its next lines."""
        self.column += columns
        width = self._width()
        if width and self.column > width:
            self.column = (self.column - 1) % width + 1


def _after(text: str, column: int) -> int:
    """Return the column at which `text` ends if it begins at `column`. Tabs are counted up to the next tab stop."""
    for number, part in enumerate(text.split("\t")):
        if number:
            column += _TAB - column % _TAB
        column += text_width(part)
    return column


def wrapped(text: str, width: int) -> str:
    """Return `text` with its lines broken between words, for a terminal of `width` columns; 0 means unchanged."""
    wrap = WordWrap[None](lambda: width)
    return "".join(part for part, _ in (*wrap.push(text, None), *wrap.flush()))
