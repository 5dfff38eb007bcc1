"""A window whose placement can be replaced between two steps, in the same memory.

The old placement's memory is freed before the new one reads its resident blocks. If half of the weights fit, that read
is about as large as the streamed part of one token. Blocks and their holds remain valid.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from scheduler.model.placement import Placement
from scheduler.model.timeline import Costs
from scheduler.slots.stats import ReadClock
from scheduler.window.stats import WindowPosition, WindowStats
from scheduler.window.window import MemoryWindow, Resident, Window
from tpi.devices.pages import Bytes
from tpi.progress import Progress, silent

OpenWindow = Callable[[Placement, ReadClock], MemoryWindow]


class SwitchedWindow:
    """A `scheduler.window.window.Window` with a replaceable placement. Only one thread may hold and switch."""

    kept: Sequence[Bytes] | None = None

    def __init__(self, make: OpenWindow, placement: Placement, progress: Progress = silent) -> None:
        """Open a window with `placement`, and wait until its resident blocks are loaded. Errors are those of `switch`.

        Args:
            make: opens a window from a placement and the clock of all reads.
            placement: the first placement.
            progress: called with the number of blocks loaded and the number of all resident blocks.
        """
        self.reads = ReadClock()
        self._make = make
        self._past, self._past_bytes = WindowStats(), 0  # counts of windows that are closed
        self._now: Window = Resident(())
        self._open(placement, progress)

    @property
    def placement(self) -> Placement:
        """The placement of the present window."""
        return self._now.placement

    def switch(self, placement: Placement) -> None:
        """Replace the placement; no block may be held.

        Raises:
            WeightsError: if a resident block could not be read; the window is closed then.
        """
        self._now.close()
        self._past, self._past_bytes = self._past + self._now.take(), self._past_bytes + self._now.progress
        self._now = Resident(())  # frees the old window's memory before the new one allocates its own
        self._open(placement, silent)

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """Return a hold of `block` in whichever window is open when it is entered."""
        return _SwitchedHold(self, block)

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """Yield the bytes of `block` from the present window, in parts as they arrive."""
        return self._now.follow(block, least)

    def take(self) -> WindowStats:
        """Return the counts since the last `take`, over all placements."""
        found, self._past = self._past + self._now.take(), WindowStats()
        return found

    def costs(self) -> Costs:
        """Return the median seconds per block in the present placement."""
        return self._now.costs()

    def history(self) -> list[Costs]:
        """Return the seconds per block of the last tokens in the present placement."""
        return self._now.history()

    @property
    def progress(self) -> int:
        """Bytes loaded since the start, over all placements."""
        return self._past_bytes + self._now.progress

    def position(self) -> WindowPosition:
        """Return the position of the present window in its cycle."""
        return self._now.position()

    def close(self) -> None:
        """Close the present window."""
        self._now.close()

    def current(self, block: int) -> AbstractContextManager[Bytes]:
        """Return the hold of a block in the present placement."""
        return self._now.hold(block)

    def _open(self, placement: Placement, progress: Progress) -> None:
        self._now = window = self._make(placement, self.reads)
        try:
            window.fill(progress)
        except BaseException:
            window.close()  # a later switch opens another
            raise


class _SwitchedHold:
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
