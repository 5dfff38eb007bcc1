"""A rich console for tables, bars and styled answers. Imported only by code that draws these."""

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tpi.system.streams import unfiltered
from tpi.text import harmless
from tpi.wrap import columns_of, wrapped


class SafeConsole(Console):
    """A console on stdout or stderr that filters the text it draws. Text is never interpreted as rich markup.

    rich's own control sequences must reach the terminal, so the console bypasses the filter of `tpi.system.streams`.
    """

    def __init__(self, stderr: bool) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(file=unfiltered(stream), highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render `renderable` as rich does, but remove control characters from its text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    @property
    def columns(self) -> int:
        """Width of the terminal in columns now; 0 if there is none or its width is unknown."""
        return columns_of(self.file)

    def say(self, sentence: str) -> None:
        """Print a sentence, wrapped between words at the width of the terminal."""
        self.print(wrapped(harmless(sentence), self.columns), soft_wrap=True)
