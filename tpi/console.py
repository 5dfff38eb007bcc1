"""A console of rich for tables, bars and styled answers. It is loaded by what draws such alone."""

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tpi.system.streams import unfiltered
from tpi.text import harmless
from tpi.wrap import columns_of, wrapped


class SafeConsole(Console):
    """A console on stdout or stderr that filters the text in what it draws; names are no markup.

    rich's own sequences have to reach the terminal, so it writes past the filter of `tpi.system.streams`.
    """

    def __init__(self, stderr: bool) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(file=unfiltered(stream), highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, without what a terminal would obey in texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    @property
    def columns(self) -> int:
        """Columns of the terminal now; 0 if there is none, or it does not know."""
        return columns_of(self.file)

    def say(self, sentence: str) -> None:
        """Print a sentence whose lines break between words at a terminal's edge, and nowhere else."""
        self.print(wrapped(harmless(sentence), self.columns), soft_wrap=True)
