"""The loads of a window: resident blocks once, streamed blocks over and over, ahead of their use.

`scheduler.slots.cycle` decides what may be read when; `scheduler.model.ring` decides where it goes. Readers take chunks
of the block that was opened first, one by one, so that a small block leaves no reader idle.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from scheduler.model.placement import Placement
from scheduler.slots.cache import SlotCache
from scheduler.slots.workers import Readers
from scheduler.storage.disk import Disk
from scheduler.storage.extent import Extent
from scheduler.window.load import BlockLoad, BlockSource, Verify
from scheduler.window.shelves import LoadLog, ResidentShelf, StreamedShelf
from scheduler.window.stats import Meter, WindowPosition, WindowStats
from tpi.devices.pages import Bytes, page_buffer
from tpi.trace import OFF, NoTrace

Memory = Callable[[int], Bytes]
"""Allocator of zeroed, page-aligned memory, given the number of bytes."""


class Loader:
    """The loader of the blocks of a placement. It follows the rules of `scheduler.slots.cache.SlotCache`."""

    def __init__(
        self,
        extents: Sequence[Extent],
        placement: Placement,
        disk: Disk,
        meter: Meter,
        verify: Verify | None = None,
        trace: NoTrace = OFF,
        noun: str = "block",
        memory: Memory | None = None,
    ) -> None:
        """Start the readers. The arguments are those of `scheduler.window.window.MemoryWindow`."""
        allocate, ring = memory or page_buffer, placement.ring
        space, homes = allocate(ring.size), dict[int, Bytes]()
        resident, at = sorted(placement.resident), 0
        together = allocate(sum(extents[block].slot_bytes for block in resident))  # small blocks share huge pages
        for block in resident:
            homes[block] = together[at : at + extents[block].slot_bytes]
            at += extents[block].slot_bytes

        def streamed(shelf: object, block: int, place: int) -> BlockLoad:
            extent, begin = extents[block], ring.offsets[place]
            return BlockLoad(shelf, block, place, extent, space[begin : begin + extent.slot_bytes], disk.chunk)

        def kept(shelf: object, block: int, place: int) -> BlockLoad:
            return BlockLoad(shelf, block, place, extents[block], homes[block], disk.chunk)

        log = LoadLog(meter, trace, noun)
        self._meter, self._source = meter, BlockSource(disk, len(extents), verify)
        self._streamed, self._resident = StreamedShelf(ring, streamed, log), ResidentShelf(resident, kept, log)
        self._kept = {block: load.view for block, load in self._resident.loads.items() if not load.parts}
        self._slots = SlotCache(self._source, Readers(disk.threads), meter, reads=meter.reads, trace=trace)
        with self._slots.lock:
            loads = [*self._resident.first(), *self._streamed.resume()]
            self._slots.submit(sorted(loads, key=lambda load: int(load.units)), ahead=True)

    def hold_kept(self, block: int) -> Bytes:
        """Wait until a resident block is loaded; return its bytes. Errors are those of `pin`."""
        if (data := self._kept.get(block)) is None:
            self._slots.enter(self._resident, (block,))
            data = self._kept[block] = self._resident.loads[block].view
        return data

    def pin(self, block: int) -> tuple[int, Bytes]:
        """Wait until a streamed block is loaded for its next use; return the use's number and the block's bytes.

        The bytes are valid until `unpin`.

        Raises:
            WeightsError: if the block could not be loaded; the message names the file.
            TpiError: if held blocks take the memory that the use needs, or the window is closed.
        """
        use: int = self._slots.enter(self._streamed, (block,))
        return use, self._streamed.loads[use % self._streamed.cycle.period].view

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """Yield the bytes of a streamed block, at its next use, in parts as they are read. Errors are those of `pin`.

        Each part has at least `least` bytes, except the last. A block that must still be verified comes in one part.
        The block may be overwritten when all parts have been taken.
        """
        shelf, slots = self._streamed, self._slots
        use: int = slots.pin(shelf, (block,))
        load = shelf.loads[use % shelf.cycle.period]
        load.followed, seen, size = True, 0, load.extent.nbytes
        unverified = block in self._source.unverified
        try:
            while seen < size:
                needed = size + 1 if unverified else min(seen + least, size)  # more than there is: wait for the check
                slots.wait(shelf, use, partial(load.has, needed))
                with slots.lock:
                    arrived = load.arrived_bytes if shelf.loading(use) else size
                yield load.view[seen:arrived]
                seen = arrived
        finally:
            slots.release(shelf, use)

    def unpin(self, use: int) -> None:
        """Release one hold of a use; the use's memory may be overwritten after the last hold."""
        self._slots.release(self._streamed, use)

    def take(self) -> WindowStats:
        """Return the counts since the last `take`; every chunk is counted exactly once."""
        with self._slots.lock:
            return self._meter.take()

    @property
    def loaded_bytes(self) -> int:
        """Bytes read since the start."""
        return self._slots.loaded_bytes

    def position(self) -> WindowPosition:
        """Return the present position in the cycle. Any thread may call it."""
        with self._slots.lock:
            cycle, shelf = self._streamed.cycle, self._streamed
            if not cycle.length:
                return WindowPosition()
            opened = range(cycle.head, cycle.tail)
            late = (use for use in opened if shelf.loading(use) or shelf.failure(use))
            ready = next(late, cycle.tail) - cycle.head
            return WindowPosition(cycle.head % cycle.length, min(ready, cycle.length), cycle.length)

    def close(self) -> None:
        """Stop and join the readers; held blocks keep their memory."""
        self._slots.close()
        with self._slots.lock:
            self._streamed.forget()
            self._resident.forget()
