"""What the block loop knows of weight memory: `with window.hold(block) as data:`.

    from scheduler.window.window import Extent, MemoryWindow, Resident, Window

`Resident` keeps every block (the scheduler is off). `MemoryWindow` keeps what a placement says and streams the rest
ahead of its use. "Scheduler" here means the scheduler of weight memory; requests are admitted by
`master.generation.batcher`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from scheduler.model.placement import Placement, place
from scheduler.model.ring import EMPTY
from scheduler.model.timeline import Costs
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.storage.extent import Extent
from scheduler.window.load import Verify
from scheduler.window.loader import Loader, Memory
from scheduler.window.stats import Meter, ReadClock, WindowPosition, WindowStats
from tpi.devices.pages import Bytes
from tpi.progress import Progress, silent
from tpi.trace import OFF, NoTrace

__all__ = ["Extent", "MemoryWindow", "Resident", "Window", "WindowStats"]


class Window(Protocol):
    """The weights of one node's blocks, block by block, in a cycle."""

    @property
    def placement(self) -> Placement:
        """What stays and what streams."""
        ...

    @property
    def kept(self) -> Sequence[Bytes] | None:
        """The bytes of every block, where all stay; else None."""
        ...

    @property
    def reads(self) -> ReadClock:
        """The clock of its reads, for windows that share its disk to share too."""
        ...

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """The bytes of `block`: 1-D uint8, page-aligned, read-only by contract, valid inside the `with` only.

        Raises:
            WeightsError: if the block could not be loaded; names the file.
        """
        ...

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """The bytes of `block`, part after part as they arrive. To be taken whole; each part is valid until the next.

        Parts of what is read meanwhile have at least `least` bytes, but for the last; what is in memory is one.

        Raises:
            WeightsError: as `hold`.
        """
        ...

    def take(self) -> WindowStats:
        """What happened since the last `take`; call it once per token."""
        ...

    def costs(self) -> Costs:
        """Median seconds per block over the last tokens, for `scheduler.model.steady.judge_streaming`."""
        ...

    def history(self) -> list[Costs]:
        """Seconds per block of each of the last tokens, for the same."""
        ...

    @property
    def progress(self) -> int:
        """Grows while blocks are loaded; may be read from another thread."""
        ...

    def position(self) -> WindowPosition:
        """Where it stands in its cycle; may be called from another thread."""
        ...

    def close(self) -> None:
        """Stop loading and join every thread. Idempotent."""
        ...


class Resident:
    """Every block in memory, loaded once: the scheduler switched off."""

    def __init__(
        self,
        extents: Sequence[Extent],
        disk: Disk | None = None,
        verify: Verify | None = None,
        progress: Progress = silent,
        memory: Memory | None = None,
    ) -> None:
        """Arguments as `MemoryWindow`; `progress(blocks done, in all)` hears of every block."""
        sizes = tuple(extent.slot_bytes for extent in extents)
        self.placement = Placement(sizes, frozenset(range(len(sizes))), EMPTY)
        self._bytes = sum(sizes)
        self.reads = ReadClock()
        self._meter = Meter(len(sizes), self._bytes, 0, self.reads)
        loader = Loader(extents, self.placement, disk or DirectDisk(), self._meter, verify, memory=memory)
        try:
            self.kept = list(_loaded(loader, range(len(extents)), progress))
        finally:
            loader.close()
        self._holds = [nullcontext(data) for data in self.kept]

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """See `Window.hold`."""
        return self._holds[block]

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """See `Window.follow`."""
        yield self.kept[block]

    def take(self) -> WindowStats:
        """See `Window.take`; nothing is counted, since nothing happens."""
        return WindowStats(resident_bytes=self._bytes)

    def costs(self) -> Costs:
        """See `Window.costs`; zeros, since nobody asks what waits for nothing."""
        return self._meter.costs()

    def history(self) -> list[Costs]:
        """See `Window.history`."""
        return self._meter.history()

    @property
    def progress(self) -> int:
        """See `Window.progress`; everything is loaded."""
        return self._bytes

    def position(self) -> WindowPosition:
        """See `Window.position`; nothing streams."""
        return WindowPosition()

    def close(self) -> None:
        """Nothing runs in the background."""


class MemoryWindow:
    """Some blocks stay, the others pass through a ring, loaded ahead across allreduces and token boundaries.

    Holds by one thread; they may nest while the ring has room. Blocks are expected in cyclic order; holding another
    one skips ahead to its next use, so an aborted step may start again at the first block. After a failed hold the next
    one tries again. Loading starts at once, in the background; `fill` waits for the blocks that stay.
    """

    kept: Sequence[Bytes] | None = None

    def __init__(
        self,
        extents: Sequence[Extent],
        placement: Placement | int,
        disk: Disk | None = None,
        verify: Verify | None = None,
        trace: NoTrace = OFF,
        noun: str = "block",
        reads: ReadClock | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Stream `extents` as `placement` says; a number is a budget in bytes for `scheduler.model.placement.place`.

        `verify(block, data)` is called once per block, after its first load, and raises WeightsError if `data` is not
        what it should be; the block is then read once more. `noun` is what a trace calls a block; `reads` is another
        window's, if both may read at once; `memory` gives what blocks lie in, pinned where a device copies from it.

        Raises:
            PlanError: if the budget cannot hold the largest block.
        """
        if isinstance(placement, int):
            placement = place([extent.slot_bytes for extent in extents], placement)
        self.placement = placement
        self.reads = reads or ReadClock()
        self._meter = Meter(len(extents), placement.resident_bytes, placement.ring.size, self.reads)
        self._loader = Loader(extents, placement, disk or DirectDisk(), self._meter, verify, trace, noun, memory)
        kinds = [_KeptHold if block in placement.resident else _StreamedHold for block in range(len(extents))]
        self._holds = [kind(block, self._loader, self._meter) for block, kind in enumerate(kinds)]

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """See `Window.hold`.

        Raises:
            WeightsError: if the block could not be loaded, twice; names the file.
            TpiError: if blocks that are held leave no room, or the window is closed.
        """
        return self._holds[block]

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """See `Window.follow`. Errors as `hold`."""
        if block in self.placement.resident:
            yield self._loader.hold_kept(block)
        else:
            yield from self._loader.follow(block, least)

    def fill(self, progress: Progress = silent) -> None:
        """Wait until every block that stays is in memory; calls `progress(blocks done, in all)`. Errors as `hold`."""
        for _ in _loaded(self._loader, sorted(self.placement.resident), progress):
            pass
        self.take()

    def take(self) -> WindowStats:
        """See `Window.take`."""
        return self._loader.take()

    def costs(self) -> Costs:
        """Median seconds per block over the last tokens, for `scheduler.model.steady.judge_streaming`."""
        return self._meter.costs()

    def history(self) -> list[Costs]:
        """Seconds per block of each of the last tokens, for the same."""
        return self._meter.history()

    @property
    def progress(self) -> int:
        """See `Window.progress`: bytes read since the start."""
        return self._meter.total_bytes

    def position(self) -> WindowPosition:
        """See `Window.position`."""
        return self._loader.position()

    def close(self) -> None:
        """See `Window.close`. Data that is still held stays valid."""
        self._loader.close()


def _loaded(loader: Loader, blocks: Sequence[int], progress: Progress) -> Iterator[Bytes]:
    for done, block in enumerate(blocks, 1):
        yield loader.hold_kept(block)
        progress(done, len(blocks))


class _KeptHold:
    """A hold of a block that stays."""

    __slots__ = ("_block", "_entered", "_loader", "_meter")

    def __init__(self, block: int, loader: Loader, meter: Meter) -> None:
        self._block, self._loader, self._meter = block, loader, meter

    def __enter__(self) -> Bytes:
        self._meter.entered(self._block, time.perf_counter())
        data = self._loader.hold_kept(self._block)
        self._entered = time.perf_counter()
        return data

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._meter.left(self._block, self._entered, time.perf_counter())


class _StreamedHold:
    """A hold of a block that passes through the ring."""

    __slots__ = ("_block", "_entered", "_loader", "_meter", "_uses")

    def __init__(self, block: int, loader: Loader, meter: Meter) -> None:
        self._block, self._loader, self._meter = block, loader, meter
        self._uses: list[int] = []  # a stack: holds of one block may nest

    def __enter__(self) -> Bytes:
        self._meter.entered(self._block, time.perf_counter())
        use, data = self._loader.pin(self._block)
        self._uses.append(use)
        self._entered = time.perf_counter()
        return data

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._meter.left(self._block, self._entered, time.perf_counter())
        self._loader.unpin(self._uses.pop())
