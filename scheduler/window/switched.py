"""A window whose placement is replaced while it is used: between two steps, in the same memory.

What the old one held is given back before the new one reads what stays; that is about what a token reads, where half of
the weights fit. The blocks are the same ones, and so are their holds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from scheduler.model.placement import Placement
from scheduler.model.timeline import Costs
from scheduler.window.stats import ReadClock, WindowPosition, WindowStats
from scheduler.window.window import MemoryWindow, Resident, Window
from tpi.devices.pages import Bytes
from tpi.progress import Progress, silent

OpenWindow = Callable[[Placement, ReadClock], MemoryWindow]


class SwitchedWindow:
    """A `scheduler.window.window.Window`. Holds and switches by one thread."""

    kept: Sequence[Bytes] | None = None

    def __init__(self, make: OpenWindow, placement: Placement, progress: Progress = silent) -> None:
        """`make` opens a window with a placement and the clock of all reads; it is filled here. Errors as `switch`."""
        self.reads = ReadClock()
        self._make = make
        self._past, self._past_bytes = WindowStats(), 0  # of windows that are closed
        self._now: Window = Resident(())
        self._open(placement, progress)

    @property
    def placement(self) -> Placement:
        """See `Window.placement`."""
        return self._now.placement

    def switch(self, placement: Placement) -> None:
        """Have this placement from now on; nothing may be held.

        Raises:
            WeightsError: if what stays could not be read; the window is closed then.
        """
        self._now.close()
        self._past, self._past_bytes = self._past + self._now.take(), self._past_bytes + self._now.progress
        self._now = Resident(())  # the memory of the old one is free before the new one takes it
        self._open(placement, silent)

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """See `Window.hold`."""
        return _SwitchedHold(self, block)

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """See `Window.follow`."""
        return self._now.follow(block, least)

    def take(self) -> WindowStats:
        """See `Window.take`."""
        found, self._past = self._past + self._now.take(), WindowStats()
        return found

    def costs(self) -> Costs:
        """See `Window.costs`, of the placement as it is."""
        return self._now.costs()

    def history(self) -> list[Costs]:
        """See `Window.history`, of the placement as it is."""
        return self._now.history()

    @property
    def progress(self) -> int:
        """See `Window.progress`."""
        return self._past_bytes + self._now.progress

    def position(self) -> WindowPosition:
        """See `Window.position`."""
        return self._now.position()

    def close(self) -> None:
        """See `Window.close`."""
        self._now.close()

    def current(self, block: int) -> AbstractContextManager[Bytes]:
        """The hold of a block in the placement as it is."""
        return self._now.hold(block)

    def _open(self, placement: Placement, progress: Progress) -> None:
        self._now = window = self._make(placement, self.reads)
        try:
            window.fill(progress)
        except BaseException:
            window.close()  # another switch opens one anew
            raise


class _SwitchedHold:
    """A hold of whichever window there is when it is entered."""

    __slots__ = ("_block", "_entered", "_window")

    def __init__(self, window: SwitchedWindow, block: int) -> None:
        self._window, self._block = window, block
        self._entered: list[AbstractContextManager[Bytes]] = []  # a stack: holds of one block may nest

    def __enter__(self) -> Bytes:
        self._entered.append(self._window.current(self._block))
        try:
            return self._entered[-1].__enter__()
        except BaseException:
            self._entered.pop()
            raise

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._entered.pop().__exit__(kind, value, at)
