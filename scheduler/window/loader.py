"""The threads that read blocks ahead, and the calls with which the block loop waits for them.

`scheduler.slots.cycle` decides what may be read when; `scheduler.model.ring` decides where it goes. Readers take
chunks of the use that was opened last, one by one, and open the next use when none are left. So a small block leaves no
reader idle.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from scheduler.model.placement import Placement
from scheduler.slots.cycle import Cycle
from scheduler.slots.wakeup import wake_soon
from scheduler.storage.disk import Disk
from scheduler.storage.extent import Extent
from scheduler.window.load import Load, Verify
from scheduler.window.stats import Meter, WindowPosition, WindowStats
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import TpiError, WeightsError
from tpi.trace import OFF, NoTrace

Memory = Callable[[int], Bytes]
"""Allocator of zeroed, page-aligned memory, given the number of bytes."""


class Loader:
    """Loader of a placement's blocks: resident blocks once, streamed blocks over and over, ahead of their use."""

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
        memory = memory or page_buffer
        ring, space = placement.ring, memory(placement.ring.size)
        self._disk, self._meter, self._verify, self._trace, self._noun = disk, meter, verify, trace, noun
        self._cycle = Cycle(ring)
        self._uses = [
            Load(block, extents[block], space[offset : offset + extents[block].slot_bytes])
            for block, offset in zip(ring.blocks, ring.offsets, strict=True)
        ]
        self._kept = dict(_side_by_side(extents, sorted(placement.resident), memory))
        self._pending = deque(load for load in self._kept.values() if load.open)
        self._unverified = set(range(len(extents))) if verify else set()
        self._current: Load | None = None
        self._stragglers = 0  # dropped loads with chunks that are still being read
        self._last_done = time.perf_counter()
        self._freed = [0.0] * len(self._uses)  # when each use was last released
        self._closed = False
        self._crash: Exception | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # readers wait for something to read
        self._done = threading.Condition(self._lock)  # the block loop waits for a load
        self._threads = [
            threading.Thread(target=self._work_on, name=f"tpi-reader-{index}", daemon=True)
            for index in range(disk.threads)
        ]
        for thread in self._threads:
            thread.start()

    # the block loop's side

    def hold_kept(self, block: int) -> Bytes:
        """Wait until a resident block is loaded; return its bytes. Raises as `pin`."""
        load = self._kept[block]
        if not load.ready:
            with self._lock:
                self._wait(load)
        return load.view

    def pin(self, block: int) -> tuple[int, Bytes]:
        """Wait for the next use of a streamed block; return its number and the block's bytes, valid until `unpin`.

        Raises:
            WeightsError: if the block could not be loaded; the message names the file.
            TpiError: if blocks that are held take the room it needs, or the window is closed.
        """
        with self._lock:
            use, load = self._approach(block)
            if not self._cycle.is_pinned(use):
                self._wait(load, use)
            self._cycle.pin(use)
            return use, load.view

    def follow(self, block: int, least: int = 1) -> Iterator[Bytes]:
        """Yield the next use of a streamed block in parts as they are read. Raises as `pin`.

        A part has at least `least` bytes, except the last. A block that must still be verified comes in one part. The
        use is over when all parts have been taken; until then nothing overwrites it.
        """
        with self._lock:
            use, load = self._approach(block)
            load.followed = True
        seen, size = 0, load.extent.nbytes
        while seen < size:
            with self._lock:
                self._wait(load, use, min(seen + least, size) - 1)
                arrived = size if load.ready else load.arrived
            yield load.view[seen:arrived]
            seen = arrived
        self.unpin(self.pin(block)[0])

    def unpin(self, use: int) -> None:
        """Release one hold of a use; its memory may be overwritten after the last."""
        with self._lock:
            if self._cycle.unpin(use):
                self._freed[use % self._cycle.period] = time.perf_counter()
                self._work.notify()

    def take(self) -> WindowStats:
        """Return what was counted since the last `take`; every chunk is counted exactly once."""
        with self._lock:
            return self._meter.take()

    def position(self) -> WindowPosition:
        """Return the present position in the cycle. Any thread may call it."""
        with self._lock:
            cycle = self._cycle
            if not cycle.length:
                return WindowPosition()
            opened = range(cycle.head, cycle.tail)
            ready = next((use - cycle.head for use in opened if not self._load_of(use).ready), len(opened))
            return WindowPosition(cycle.head % cycle.length, min(ready, cycle.length), cycle.length)

    def close(self) -> None:
        """Stop and join the readers."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._done.notify_all()
        for thread in self._threads:
            thread.join()

    def _approach(self, block: int) -> tuple[int, Load]:
        """Return the use of a block that is held or comes next, with its load; give up all uses before it."""
        use = self._cycle.next_use(block)
        if not self._cycle.is_pinned(use) and use != self._cycle.head:
            self._drop(self._cycle.skip_to(use))
        return use, self._load_of(use)

    def _load_of(self, use: int) -> Load:
        return self._uses[use % self._cycle.period]

    def _drop(self, uses: range) -> None:
        """Stop reading these uses. Their memory is free once the reads that are in flight have ended."""
        for use in uses:
            load = self._load_of(use)
            load.stop()
            if load.flying and not load.dropped:
                load.dropped = True
                self._stragglers += 1
            if load is self._current:
                self._current = None
        self._work.notify()

    def _wait(self, load: Load, use: int = -1, seen: int | None = None) -> None:
        """Wait until the block is loaded or, if it needs no verification, until more than `seen` bytes of it are.

        If the load failed before this call, the block is read again first: the disk may have recovered since.
        """
        begun = 0.0
        if 0 <= use < self._cycle.tail and load.error is not None and not load.flying:
            self._drop(self._cycle.rewind_to(use))
        if load.block in self._unverified:
            seen = None
        while use >= self._cycle.tail or not (load.ready or (seen is not None and load.arrived > seen)):
            begun = begun or time.perf_counter()
            opened = use < self._cycle.tail
            if self._closed:
                raise TpiError("the memory window is closed; nothing can be held any more") from self._crash
            if not opened and not self._cycle.may_open(use):
                raise TpiError(f"block {load.block} cannot be held yet: release the blocks that are held first")
            if opened and load.error is not None and not load.flying:
                raise self._failure(load, load.error, use)
            self._done.wait()
        if begun:
            now = time.perf_counter()
            self._meter.stall(now - begun)
            self._meter.woke(now - max(begun, load.ended))
            self._trace.add("stall", f"{self._noun} {load.block}", int(begun * 1e9), int(now * 1e9))

    def _failure(self, load: Load, error: WeightsError, use: int) -> WeightsError:
        """Return the load's error, and reset the load so that the next hold tries again."""
        if use < 0:
            load.reset()
            if load is self._current:
                self._current = None  # one reader will open it again
            self._pending.append(load)
            self._work.notify()
        else:
            self._drop(self._cycle.rewind_to(use))
        return error

    # the readers' side

    def _work_on(self) -> None:
        wake_soon()  # the disk is idle from the end of a chunk until its reader starts the next
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - holds that wait raise TpiError from it
            with self._lock:
                self._crash, self._closed = error, True
                self._work.notify_all()
                self._done.notify_all()

    def _read(self) -> None:
        with self._lock:
            while True:
                load = self._open_load()
                if self._closed:
                    return
                if load is None:
                    self._work.wait()
                    continue
                start = load.cursor
                load.cursor = min(start + self._disk.chunk, load.extent.slot_bytes)
                size = load.cursor - start
                load.flying += 1
                self._meter.begin_read()
                self._work.notify()  # there may be more to read: wake another
                self._lock.release()
                try:
                    error = load.read_chunk(self._disk, start)
                finally:
                    self._lock.acquire()
                self._finish_chunk(load, start, size, error)

    def _open_load(self) -> Load | None:
        """Return the load to take the next chunk from; None if there is nothing to read."""
        if self._current is not None and self._current.open:
            return self._current
        use = self._cycle.tail
        room = not self._stragglers and self._cycle.may_open(use)
        first = self._pending[0].block if self._pending else -1
        if self._pending and (not room or use >= self._cycle.length or first < self._load_of(use).block):
            load, begun = self._pending.popleft(), self._last_done
        elif room:
            load, begun = self._load_of(use), self._freed[self._cycle.overwritten(use)]
            self._cycle.tail += 1
        else:
            return None
        load.reset()
        load.begun = begun  # when it could have begun: waking a reader is part of loading
        self._current = load
        return load

    def _finish_chunk(self, load: Load, start: int, size: int, error: WeightsError | None) -> None:
        self._meter.end_read(size)
        if error is not None:
            load.error = error
            load.stop()
        else:
            load.landed(start, size)
            if load.followed:
                self._done.notify_all()
        last = load.flying == 1 and not load.open
        if last and load.error is None and not load.dropped and self._verify and load.block in self._unverified:
            self._lock.release()
            try:
                load.error = load.check(self._disk, self._verify)
            finally:
                self._lock.acquire()
        load.flying -= 1
        if last:
            self._finish(load)

    def _finish(self, load: Load) -> None:
        if load.dropped:
            load.dropped = False
            self._stragglers -= 1
            self._work.notify()
        elif load.error is None:
            load.ready = True
            self._unverified.discard(load.block)
            self._record(load)
        self._done.notify_all()

    def _record(self, load: Load) -> None:
        now = time.perf_counter()
        begun = max(load.begun, self._last_done)  # chunks of two loads may overlap, but each second counts once
        self._meter.loaded(load.block, now - begun)
        self._last_done = load.ended = now
        self._trace.add("load", f"{self._noun} {load.block}", int(begun * 1e9), int(now * 1e9))


def _side_by_side(extents: Sequence[Extent], blocks: Sequence[int], memory: Memory) -> Iterator[tuple[int, Load]]:
    """Yield a load for each of `blocks`, all in one buffer: small blocks share its huge pages."""
    space, at = memory(sum(extents[block].slot_bytes for block in blocks)), 0
    for block in blocks:
        size = extents[block].slot_bytes
        yield block, Load(block, extents[block], space[at : at + size])
        at += size
