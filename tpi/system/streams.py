"""The filter for all printed text, so that text from models, files and other nodes cannot control the terminal.

`tpi.cli.main` installs it over stdout and stderr. It removes control characters and directional marks from all text
written through them (`tpi.text.harmless`), and wraps sentences on stderr between words. Only `unfiltered` bypasses it:
for the bytes of an answer that is piped, and for libraries that make terminal sequences from text filtered before.
"""

import os
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

from tpi.text import harmless
from tpi.wrap import WordWrap, columns_of


class FilteredStream:
    """A text stream that filters what it passes on. It has no `buffer`, which would bypass the filter."""

    def __init__(self, stream: TextIO, wrap: bool) -> None:
        """Filter text for `stream`; with `wrap`, also break lines between words if it is a terminal."""
        self.unfiltered = stream
        self._words = WordWrap[None](lambda: columns_of(stream)) if wrap else None

    def write(self, text: str) -> int:
        """Write `text` without control characters and directional marks. Return the length of `text`."""
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
    """Install the filter over this process's stdout and stderr. Characters that they cannot encode are replaced.

    If stderr is closed, as with `2>&-` in a shell, what is written to it is dropped.
    """
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - it is open as long as the process runs
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
            setattr(sys, name, cast(TextIO, FilteredStream(stream, wrap=name == "stderr")))


def unfiltered(stream: TextIO) -> TextIO:
    """Return the unfiltered stream below `stream`, for text that was filtered before or does not go to a terminal."""
    return stream.unfiltered if isinstance(stream, FilteredStream) else stream
