"""The one filter for everything that is printed: no text from elsewhere gives orders to a terminal.

`tpi.cli.main` puts it over stdout and stderr. What is written through them, by whatever library, has no control
characters and no directional marks (`tpi.text.harmless`), and sentences on stderr are wrapped between words. Only
`unfiltered` goes past it: for the bytes of an answer that is piped, and for libraries that make a terminal's sequences
of text that was filtered before.
"""

import sys
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Any, TextIO, cast

from tpi.text import harmless
from tpi.wrap import WordWrap, columns_of


class FilteredStream:
    """A text stream over another one; it has no `buffer`, which would go past the filter."""

    def __init__(self, stream: TextIO, wrap: bool) -> None:
        """`wrap`: break lines between words, where `stream` is a terminal."""
        self.unfiltered = stream
        self._words = WordWrap[None](lambda: columns_of(stream)) if wrap else None

    def write(self, text: str) -> int:
        """Write `text` without what a terminal would obey; return its length."""
        shown = harmless(text)
        if self._words is not None:
            shown = "".join(part for part, _ in (*self._words.push(shown, None), *self._words.flush()))
        self.unfiltered.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.unfiltered, name)


def filter_output() -> None:
    """Put the filter over this process's stdout and stderr; a character that a terminal lacks ends nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
            setattr(sys, name, cast(TextIO, FilteredStream(stream, wrap=name == "stderr")))


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream below the filter of `stream`, for text that was filtered already or is not for a terminal."""
    return stream.unfiltered if isinstance(stream, FilteredStream) else stream
