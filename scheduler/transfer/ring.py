"""A ring in accelerators' memory through which segments pass, loaded from the tier below ahead of their use.

Its arithmetic is that of the memory window (`scheduler.model.ring`, `scheduler.window.cycle`): the size of the ring
decides how far loading runs ahead. With room for two neighbours, the next segment is loaded while one is computed
(PIPO's performance pipeline). With room for one, it is loaded after the one before is released (the memory pipeline).

A ring may span the memories of several accelerators (`scheduler.transfer.merged`). Segments are then requested in the
order of use, whichever accelerator they go to, and all links work at once. Segments that the tier below streams are
read one after the other in that order, because that tier has a single reader.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from scheduler.model.ring import Ring
from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from scheduler.window.cycle import Cycle
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.errors import TpiError
from tpi.trace import OFF, NoTrace

Feed = Callable[[Bytes], None]
"""Function that fills a segment's place in the accelerator's memory, in order, and returns when it is full."""


@dataclass(frozen=True)
class RingContents:
    """One segment that passes through the ring."""

    name: str  # what traces and errors call it
    nbytes: int
    feed: Feed
    card: int = 0  # the accelerator that it goes to: the number of the ring's part
    in_turn: bool = False  # whether the tier below streams it


@dataclass(frozen=True)
class RingPart:
    """The ring's memory on one accelerator."""

    device: Device
    memory: Bytes  # at least as large as the ring's part on this accelerator


class DeviceRing:
    """The ring of a node. Only one thread may hold segments; a released one is freed once its device has used it.

    The error of a load is raised by the hold that waits for it, and the next hold tries again. A new ring is paused.
    """

    def __init__(
        self,
        parts: Sequence[RingPart],
        ring: Ring,
        contents: Mapping[int, RingContents],
        queue: TransferQueue,
        trace: NoTrace = OFF,
    ) -> None:
        """Create a paused ring; segment n is `contents[n]`, in the memory of its accelerator, at the ring's offset.

        Args:
            parts: the ring's memory on each accelerator.
            ring: the layout.
            contents: each segment by its number.
            queue: where loads are submitted.
            trace: recorder of stalls.
        """
        self._parts, self._queue, self._trace, self._contents = parts, queue, trace, contents
        self._cycle = Cycle(ring)
        places = zip(ring.blocks, ring.offsets, strict=True)
        self._slots = [self._slot(segment, offset) for segment, offset in places]
        self._segments = ring.blocks
        self._loads: list[QueuedTransfer | None] = [None] * len(ring.blocks)  # the load of each use in the period
        self._last: dict[int, QueuedTransfer] = {}  # the last load to each accelerator
        self._in_turn: QueuedTransfer | None = None  # the last load of a segment that the tier below streams
        self._lock = threading.Lock()
        self._paused = True
        self.loaded_bytes = 0
        self.stall_seconds = 0.0

    def hold(self, segment: int) -> "RingHold":
        """Return a context manager that yields the bytes of `segment` in the accelerator's memory.

        Raises:
            WeightsError: if the segment could not be loaded; the message names the file.
            TpiError: if the segments that are held leave no room, or the queue is closed.
        """
        return RingHold(self, segment)

    def resume(self) -> None:
        """Start loading ahead, from the next use."""
        with self._lock:
            self._paused = False
            self._open()

    def pause(self) -> None:
        """Stop loading and forget what was loaded ahead; the ring's memory may then serve another purpose."""
        self.quiet()
        with self._lock:
            self._paused = True
            self._cycle.rewind_to(self._cycle.head)

    def quiet(self) -> None:
        """Wait until no load is in flight, so that others may hold the tier below. What was loaded stays."""
        self._finish_releases()
        for last in self._last.values():
            last.join()  # loads of weights end in order, so all earlier ones have ended too

    def abandon(self) -> None:
        """Abort the step; a segment that failed to load is loaded again when it is needed next."""
        self.quiet()
        with self._lock:
            uses = range(self._cycle.head, self._cycle.tail)
            failed = [use for use in uses if (load := self._loads[use % self._cycle.period]) and load.error]
            if failed:
                self._cycle.rewind_to(failed[0])

    def pin(self, segment: int) -> tuple[int, Bytes]:
        """Wait for the next use of a segment; return its number and bytes, valid until `unpin`. Raises as `hold`."""
        use = self._open_use(segment)
        if use is None:
            self._finish_releases()
            use = self._open_use(segment)
        if use is None:
            raise TpiError(f"{self._contents[segment].name} cannot be held yet: release what is held first")
        place = use % self._cycle.period
        self._wait(place, use)  # nothing overwrites the slot, because the use is not over
        with self._lock:
            self._cycle.pin(use)
        return use, self._slots[place]

    def unpin(self, use: int) -> None:
        """Release a use once the device has finished the calls started so far."""
        segment = self._segments[use % self._cycle.period]
        self._parts[self._contents[segment].card].device.start(lambda: self._release(use))

    def _slot(self, segment: int, offset: int) -> Bytes:
        contents = self._contents[segment]
        return self._parts[contents.card].memory[offset : offset + contents.nbytes]

    def _finish_releases(self) -> None:
        """Wait until every release that was requested has happened."""
        for part in self._parts:
            part.device.start(lambda: None).wait()

    def _open_use(self, segment: int) -> int | None:
        """Return the use of a segment that is held or comes next; None if there is no room for it."""
        with self._lock:
            use = self._cycle.next_use(segment)
            if not self._cycle.is_pinned(use):
                self._cycle.skip_to(use)
                self._open()
            return use if use < self._cycle.tail else None

    def _wait(self, place: int, use: int) -> None:
        load = self._loads[place]
        assert load is not None  # the use was opened
        began, waited = time.perf_counter(), not load.done
        try:
            load.wait()
        except Exception:
            with self._lock:  # the next hold loads it again
                self._cycle.rewind_to(use)
            raise
        if waited:
            ended = time.perf_counter()
            self.stall_seconds += ended - began
            self._trace.add("stall", load.name, int(began * 1e9), int(ended * 1e9))

    def _release(self, use: int) -> None:
        with self._lock:
            if self._cycle.unpin(use):
                self._open()

    def _open(self) -> None:
        """Submit every load that there is room for.

        Loads of weights run one after the other, so no load shares a slot with a later one.
        """
        while not self._paused and self._cycle.may_open(self._cycle.tail):
            place = self._cycle.tail % self._cycle.period
            segment, slot = self._segments[place], self._slots[place]
            self._loads[place] = self._submit(self._contents[segment], slot)
            self._cycle.tail += 1

    def _submit(self, contents: RingContents, slot: Bytes) -> QueuedTransfer:
        def load() -> None:
            contents.feed(slot)
            with self._lock:
                self.loaded_bytes += slot.size

        behind = self._in_turn if contents.in_turn else None
        made = self._queue.submit("weight load", contents.name, load, link=contents.card, behind=behind)
        self._last[contents.card] = made
        if contents.in_turn:
            self._in_turn = made
        return made


class RingHold:
    """Context manager of `DeviceRing.hold`."""

    __slots__ = ("_ring", "_segment", "_use")

    def __init__(self, ring: DeviceRing, segment: int) -> None:
        self._ring, self._segment = ring, segment

    def __enter__(self) -> Bytes:
        self._use, data = self._ring.pin(self._segment)
        return data

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ring.unpin(self._use)
