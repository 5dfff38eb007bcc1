"""The threads that read blocks ahead, and what the holding thread and they agree on.

Streamed uses are numbered 0, 1, 2, ... in cyclic order; use n is of block `ring.blocks[n % period]`. The state is four
numbers: uses below `_released` are over, `_head` comes next in the block loop, those below `_tail` are loaded or being
loaded, and use `_tail` is opened once `_tail - lag < _released` (see `scheduler.ring`, also for why a hold cannot
deadlock). Readers take chunks of the opened use one by one, so a small block never leaves a reader idle.

The block loop need not keep the order: holding another block skips ahead to that block's next use.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from scheduler.disk import Disk, read_chunk, read_extent
from scheduler.extent import Extent
from scheduler.memory import Bytes, page_buffer
from scheduler.placement import Placement
from scheduler.stats import Meter
from tpi.errors import TpiError, WeightsError
from tpi.trace import OFF, Off

Verify = Callable[[int, Bytes], None]  # block, its bytes; raises WeightsError if they are not what they should be


class _Load:
    """One block on its way into its place in memory."""

    def __init__(self, block: int, extent: Extent, slot: Bytes) -> None:
        self.block, self.extent, self.slot = block, extent, slot
        self.view = extent.view(slot)
        self.reset()

    def reset(self) -> None:
        """Nothing read yet."""
        self.cursor = 0  # where the next chunk starts
        self.flying = 0  # chunks being read
        self.begun = 0.0
        self.ready = not self.open  # a node may have nothing of a block
        self.dropped = False
        self.error: WeightsError | None = None

    def stop(self) -> None:
        """Hand out no more chunks."""
        self.cursor = self.extent.slot_bytes

    @property
    def open(self) -> bool:
        """Whether chunks are left to hand out."""
        return self.cursor < self.extent.slot_bytes


class Loader:
    """Loads the blocks of a placement: those that stay once, the others over and over, ahead of their use."""

    def __init__(
        self,
        extents: Sequence[Extent],
        placement: Placement,
        disk: Disk,
        meter: Meter,
        verify: Verify | None = None,
        trace: Off = OFF,
    ) -> None:
        ring, space = placement.ring, page_buffer(placement.ring.size)
        self._disk, self._meter, self._verify, self._trace = disk, meter, verify, trace
        self._ring, self._cycle = ring, len(set(ring.blocks))
        self._place = {block: use for use, block in reversed(list(enumerate(ring.blocks)))}
        self._uses = [
            _Load(block, extents[block], space[offset : offset + extents[block].slot_bytes])
            for block, offset in zip(ring.blocks, ring.offsets, strict=True)
        ]
        stay = sorted(placement.resident)
        self._kept = {b: _Load(b, extents[b], page_buffer(extents[b].slot_bytes)) for b in stay}
        self._pending = deque(load for load in self._kept.values() if load.open)
        self._unverified = set(range(len(extents))) if verify else set()
        self._current: _Load | None = None
        self._head = self._tail = self._released = 0
        self._pins: dict[int, int] = {}  # use: holds of it
        self._stragglers = 0  # dropped loads of which chunks are still being read
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
        """The bytes of a block that stays, once it is loaded. Errors as `pin`."""
        load = self._kept[block]
        if not load.ready:
            with self._lock:
                self._wait(load)
        return load.view

    def pin(self, block: int) -> tuple[int, Bytes]:
        """Wait for the next use of a streamed block; keep it in memory until `unpin` of the number returned.

        Raises:
            WeightsError: if it could not be loaded; names the file.
            TpiError: if blocks that are held take the room it needs, or the window is closed.
        """
        with self._lock:
            use = self._next_use(block)
            if use not in self._pins:
                self._skip_to(use)
                self._wait(self._uses[use % len(self._uses)], use)
                self._head = use + 1
            self._pins[use] = self._pins.get(use, 0) + 1
            return use, self._uses[use % len(self._uses)].view

    def unpin(self, use: int) -> None:
        """The block of this use may be overwritten."""
        with self._lock:
            self._pins[use] -= 1
            if not self._pins[use]:
                del self._pins[use]
                self._freed[use % len(self._uses)] = time.perf_counter()
                self._advance()

    def close(self) -> None:
        """Stop and join the readers."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._done.notify_all()
        for thread in self._threads:
            thread.join()

    def _next_use(self, block: int) -> int:
        for use in self._pins:
            if self._ring.blocks[use % len(self._uses)] == block:
                return use
        return self._head + (self._place[block] - self._head) % self._cycle

    def _skip_to(self, use: int) -> None:
        if use > self._head:
            for skipped in range(self._head, min(use, self._tail)):
                self._drop(self._uses[skipped % len(self._uses)])
            self._head, self._tail = use, max(use, self._tail)
            self._advance()

    def _advance(self) -> None:
        self._released = min(self._pins, default=self._head)
        self._work.notify()

    def _drop(self, load: _Load) -> None:
        load.stop()
        if load.flying and not load.dropped:
            load.dropped = True
            self._stragglers += 1
        if load is self._current:
            self._current = None

    def _wait(self, load: _Load, use: int = -1) -> None:
        begun = 0.0
        while not load.ready or use >= self._tail:
            begun = begun or time.perf_counter()
            if self._closed:
                raise TpiError("the memory window is closed; nothing can be held any more") from self._crash
            if use >= self._tail and not self._has_room(use):
                raise TpiError(f"block {load.block} cannot be held yet: release the blocks that are held first")
            if load.error is not None and use < self._tail and not load.flying:
                self._fail(load, use)
            self._done.wait()
        if begun:
            now = time.perf_counter()
            self._meter.stall(now - begun)
            self._trace.add("stall", f"block {load.block}", int(begun * 1e9), int(now * 1e9))

    def _fail(self, load: _Load, use: int) -> None:
        """Raise what went wrong, and arrange for the next hold to try again."""
        error = load.error
        assert error is not None
        if use < 0:
            load.reset()
            self._pending.append(load)
        else:
            for ahead in range(use, self._tail):
                self._drop(self._uses[ahead % len(self._uses)])
            self._tail = use
        self._work.notify()
        raise error

    def _has_room(self, use: int) -> bool:
        return use - self._ring.lags[use % len(self._uses)] < self._released

    # the readers' side

    def _work_on(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - whatever it is, it surfaces where the block is awaited
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
                load.cursor += self._disk.chunk
                load.flying += 1
                self._meter.fly()
                self._work.notify()  # there may be more to read: wake another
                self._lock.release()
                try:
                    error = self._read_chunk(load, start)
                finally:
                    self._lock.acquire()
                self._finish_chunk(load, error)

    def _open_load(self) -> _Load | None:
        """The load to take a chunk of, if there is one."""
        if self._current is not None and self._current.open:
            return self._current
        room = bool(self._uses) and not self._stragglers and self._has_room(self._tail)
        use = self._tail % len(self._uses) if room else 0
        if self._pending and (not room or self._tail >= self._cycle or self._pending[0].block < self._uses[use].block):
            load, begun = self._pending.popleft(), self._last_done
        elif room:
            load, begun = self._uses[use], self._freed[use - self._ring.lags[use]]
            self._tail += 1
        else:
            return None
        load.reset()
        load.begun = begun  # it could have begun then: waking a reader is part of loading
        self._current = load
        return load

    def _read_chunk(self, load: _Load, start: int) -> WeightsError | None:
        try:
            read_chunk(self._disk, load.extent, load.slot, start)
        except WeightsError as error:
            return error
        return None

    def _finish_chunk(self, load: _Load, error: WeightsError | None) -> None:
        self._meter.land(min(self._disk.chunk, load.extent.slot_bytes))
        if error is not None:
            load.error = error
            load.stop()
        last = load.flying == 1 and not load.open
        if last and load.error is None and not load.dropped and load.block in self._unverified:
            self._lock.release()
            try:
                load.error = self._check(load)
            finally:
                self._lock.acquire()
        load.flying -= 1
        if last:
            self._finish(load)

    def _finish(self, load: _Load) -> None:
        if load.dropped:
            load.dropped = False
            self._stragglers -= 1
            self._work.notify()
        elif load.error is None:
            load.ready = True
            self._unverified.discard(load.block)
            self._record(load)
        self._done.notify_all()

    def _check(self, load: _Load) -> WeightsError | None:
        """Verify a block; read it once more if it is not what it should be."""
        assert self._verify is not None
        try:
            self._verify(load.block, load.view)
        except WeightsError:
            try:
                self._verify(load.block, read_extent(self._disk, load.extent, load.slot))
            except WeightsError as error:
                return error
        return None

    def _record(self, load: _Load) -> None:
        now = time.perf_counter()
        begun = max(load.begun, self._last_done)  # chunks of neighbours overlap; loads are accounted one by one
        self._meter.loaded(load.block, now - begun)
        self._last_done = now
        self._trace.add("load", f"block {load.block}", int(begun * 1e9), int(now * 1e9))
