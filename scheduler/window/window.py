"""The block loop's view of weight memory: `with window.hold(block) as data:`.

    from scheduler.window.window import Extent, MemoryWindow, Resident, Window

`Resident` has every block in memory. `MemoryWindow` has the resident blocks of a placement in memory and streams the
others ahead of their use. This is the scheduler of weight memory; requests are scheduled by
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
from scheduler.slots.stats import ReadClock
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.storage.extent import Extent
from scheduler.window.load import Verify
from scheduler.window.loader import Loader, Memory
from scheduler.window.stats import Meter, WindowPosition, WindowStats
from tpi.devices.pages import Bytes
from tpi.progress import Progress, silent
from tpi.trace import OFF, NoTrace

__all__ = ["Extent", "MemoryWindow", "Resident", "Window", "WindowStats"]


class Window(Protocol):
    """The weights of one node's blocks, used block by block in a cycle."""

    @property
    def placement(self) -> Placement:
        """The placement: which blocks are resident and which are streamed."""
        ...

    @property
    def kept(self) -> Sequence[Bytes] | None:
        """The bytes of every block if all are resident; else None."""
        ...

    @property
    def reads(self) -> ReadClock:
        """The clock of this window's reads; windows on the same disk can share it."""
        ...

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """Return a context manager that yields the bytes of `block`: 1-D uint8, page-aligned.

        The bytes are valid only inside the `with`, and must not be written to.

        Raises:
            WeightsError: if the block could not be loaded; the message names the file.
        """
        ...

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """Yield the bytes of `block` in parts as they arrive; each part is valid until the next one is requested.

        The caller must take all parts. Parts have at least `least` bytes, except the last; a block in memory is one
        part.

        Raises:
            WeightsError: if the block could not be loaded; the message names the file.
        """
        ...

    def take(self) -> WindowStats:
        """Return the counts since the last `take`; call this once per token."""
        ...

    def costs(self) -> Costs:
        """Return the median seconds per block over the last tokens, for `scheduler.model.steady.judge_streaming`."""
        ...

    def history(self) -> list[Costs]:
        """Return the seconds per block of each of the last tokens, for `scheduler.model.steady.judge_streaming`."""
        ...

    @property
    def progress(self) -> int:
        """Number that grows while blocks are loaded. Any thread may read it."""
        ...

    def position(self) -> WindowPosition:
        """Return the present position in the cycle. Any thread may call it."""
        ...

    def close(self) -> None:
        """Stop loading and join every thread. Further calls do nothing."""
        ...


class Resident:
    """A window with every block in memory, loaded once."""

    def __init__(
        self,
        extents: Sequence[Extent],
        disk: Disk | None = None,
        verify: Verify | None = None,
        progress: Progress = silent,
        memory: Memory | None = None,
    ) -> None:
        """Load all blocks; call `progress(blocks done, blocks in all)` after each.

        The other arguments are those of `MemoryWindow`.
        """
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
        """Return a context manager that yields the bytes of `block`."""
        return self._holds[block]

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """Yield the bytes of `block` as one part."""
        yield self.kept[block]

    def take(self) -> WindowStats:
        """Return the window's memory size; nothing is counted, because nothing is read."""
        return WindowStats(resident_bytes=self._bytes)

    def costs(self) -> Costs:
        """Return the seconds that each block took to load; computing and exchanges are not measured."""
        return self._meter.costs()

    def history(self) -> list[Costs]:
        """Return the costs of each of the last tokens, all the same."""
        return self._meter.history()

    @property
    def progress(self) -> int:
        """Bytes of all blocks, which are loaded."""
        return self._bytes

    def position(self) -> WindowPosition:
        """Return an empty position, because nothing is streamed."""
        return WindowPosition()

    def close(self) -> None:
        """Do nothing, because nothing runs in the background."""


class MemoryWindow:
    """A window with some resident blocks; the others pass through a ring, loaded ahead across allreduces and tokens.

    Only one thread may hold blocks; holds may nest while the ring has room. Blocks are expected in cyclic order.
    Holding a block out of order skips ahead to its next use, so a step that was aborted may start again at the first
    block. After a failed hold, the next hold tries again. Loading starts at once in the background; `fill` waits for
    the resident blocks.
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
        """Start to load `extents` as `placement` says.

        Args:
            extents: where each block is on disk, in the order of use.
            placement: which blocks are resident; or a budget in bytes for `scheduler.model.placement.place`.
            disk: the disk to read from; None: a `DirectDisk`.
            verify: called as `verify(block, data)` once per block, after its first load; raises WeightsError if `data`
                is wrong. The block is then read and verified once more.
            trace: recorder of loads and stalls.
            noun: the word for a block in traces.
            reads: the clock of another window, if both may read at once.
            memory: allocator of the blocks' memory, pinned if a device copies from it.

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
        """Return a context manager that yields the bytes of `block`.

        Raises:
            WeightsError: if the block could not be loaded in two attempts; the message names the file.
            TpiError: if held blocks leave no room in the ring, or the window is closed.
        """
        return self._holds[block]

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """Yield the bytes of `block` in parts of at least `least` bytes as they arrive, as one part if it is in memory.

        Raises:
            WeightsError: if the block could not be loaded; the message names the file.
        """
        if block in self.placement.resident:
            yield self._loader.hold_kept(block)
        else:
            yield from self._loader.follow(block, least)

    def fill(self, progress: Progress = silent) -> None:
        """Wait until every resident block is loaded, and call `progress(done, total)` after each, in blocks.

        Errors are those of `hold`.
        """
        for _ in _loaded(self._loader, sorted(self.placement.resident), progress):
            pass
        self.take()

    def take(self) -> WindowStats:
        """Return the counts since the last call of `take`."""
        return self._loader.take()

    def costs(self) -> Costs:
        """Return the median seconds per block over the last tokens, for `scheduler.model.steady.judge_streaming`."""
        return self._meter.costs()

    def history(self) -> list[Costs]:
        """Return the seconds per block of each of the last tokens, for `scheduler.model.steady.judge_streaming`."""
        return self._meter.history()

    @property
    def progress(self) -> int:
        """Bytes read since the start."""
        return self._loader.loaded_bytes

    def position(self) -> WindowPosition:
        """Return the present position in the cycle. Any thread may call it."""
        return self._loader.position()

    def close(self) -> None:
        """Stop loading and join every thread. Data that is still held stays valid. Further calls do nothing."""
        self._loader.close()


def _loaded(loader: Loader, blocks: Sequence[int], progress: Progress) -> Iterator[Bytes]:
    for done, block in enumerate(blocks, 1):
        yield loader.hold_kept(block)
        progress(done, len(blocks))


class _KeptHold:
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
