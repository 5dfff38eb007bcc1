"""Segments that pass through a ring in accelerators' memory, loaded from the tier below ahead of their use.

The ring's arithmetic is that of the memory window (`scheduler.model.ring`, `scheduler.window.cycle`): how far loading
runs ahead is how large the ring is. With room for two neighbours the next segment is loaded while one is computed
(PIPO's performance pipeline), with room for one it is loaded when the one before is over (the memory pipeline).

A ring may lie in the memories of several accelerators (`scheduler.transfer.merged`): segments are then asked for in the
order of use, wherever they go, over links that all work at once; and those that the tier below streams are taken from
there one after the other in that order, as its one reader must.
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
"""Fills a segment's place in the accelerator's memory, from its first byte on, and returns when all is there."""


@dataclass(frozen=True)
class RingContents:
    """One segment that passes through."""

    name: str  # what traces and errors call it
    nbytes: int
    feed: Feed
    card: int = 0  # in whose memory it is: the number of the part
    in_turn: bool = False  # the tier below streams it


@dataclass(frozen=True)
class RingPart:
    """Memory of one accelerator, as much as the ring has there at least."""

    device: Device
    memory: Bytes


class DeviceRing:
    """The ring of a node. Holds by one thread; what was held is given back when its device has used it.

    A failed load surfaces in the hold that waits for it; the next hold tries again. It begins paused.
    """

    def __init__(
        self,
        parts: Sequence[RingPart],
        ring: Ring,
        contents: Mapping[int, RingContents],
        queue: TransferQueue,
        trace: NoTrace = OFF,
    ) -> None:
        """Segment n of the ring is `contents[n]`, in the memory of its card's part, from the ring's offset on."""
        self._parts, self._queue, self._trace, self._contents = parts, queue, trace, contents
        self._cycle = Cycle(ring)
        places = zip(ring.blocks, ring.offsets, strict=True)
        self._slots = [self._slot(segment, offset) for segment, offset in places]
        self._segments = ring.blocks
        self._loads: list[QueuedTransfer | None] = [None] * len(ring.blocks)  # of each use in the period
        self._last: dict[int, QueuedTransfer] = {}  # of each card
        self._in_turn: QueuedTransfer | None = None  # the last from what the tier below streams
        self._lock = threading.Lock()
        self._paused = True
        self.loaded_bytes = 0
        self.stall_seconds = 0.0

    def hold(self, segment: int) -> "RingHold":
        """The bytes of `segment` in the accelerator's memory, for a `with`.

        Raises:
            WeightsError: if it could not be loaded; names the file.
            TpiError: if segments that are held leave no room, or the queue is closed.
        """
        return RingHold(self, segment)

    def resume(self) -> None:
        """Load ahead from now on, from the next use on."""
        with self._lock:
            self._paused = False
            self._open()

    def pause(self) -> None:
        """Load nothing more, and forget what was loaded ahead: its memory may serve another."""
        self.quiet()
        with self._lock:
            self._paused = True
            self._cycle.rewind_to(self._cycle.head)

    def quiet(self) -> None:
        """Wait until nothing is on its way: the tier below may then be held by others. What was loaded stays."""
        self._give_back()
        for last in self._last.values():
            last.join()  # loads of weights go one after the other

    def abandon(self) -> None:
        """The step breaks off: what failed to load for it is asked for anew by whoever wants it next."""
        self.quiet()
        with self._lock:
            uses = range(self._cycle.head, self._cycle.tail)
            failed = [use for use in uses if (load := self._loads[use % self._cycle.period]) and load.error]
            if failed:
                self._cycle.rewind_to(failed[0])

    def pin(self, segment: int) -> tuple[int, Bytes]:
        """Wait for the next use of a segment; it stays until `unpin` of the number returned. Errors as `hold`."""
        use = self._opened(segment)
        if use is None:
            self._give_back()
            use = self._opened(segment)
        if use is None:
            raise TpiError(f"{self._contents[segment].name} cannot be held yet: release what is held first")
        place = use % self._cycle.period
        self._wait(place, use)  # nothing overwrites it meanwhile: the use is not over
        with self._lock:
            self._cycle.pin(use)
        return use, self._slots[place]

    def unpin(self, use: int) -> None:
        """Give a use back when the device is through with what it was told so far."""
        segment = self._segments[use % self._cycle.period]
        self._parts[self._contents[segment].card].device.start(lambda: self._release(use))

    def _slot(self, segment: int, offset: int) -> Bytes:
        contents = self._contents[segment]
        return self._parts[contents.card].memory[offset : offset + contents.nbytes]

    def _give_back(self) -> None:
        """Wait until what was held and let go is over."""
        for part in self._parts:
            part.device.start(_nothing).wait()

    def _opened(self, segment: int) -> int | None:
        """The use of a segment that is held or comes next, if there is room for it."""
        with self._lock:
            use = self._cycle.next_use(segment)
            if not self._cycle.is_pinned(use):
                self._cycle.skip_to(use)
                self._open()
            return use if use < self._cycle.tail else None

    def _wait(self, place: int, use: int) -> None:
        load = self._loads[place]
        assert load is not None  # it was opened
        began, waited = time.perf_counter(), not load.done
        try:
            load.wait()
        except Exception:
            with self._lock:  # the next hold asks for it anew
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
        """Load what there is room for. Loads of weights go one after the other, so none meets a later one in a slot."""
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
    """See `DeviceRing.hold`."""

    __slots__ = ("_ring", "_segment", "_use")

    def __init__(self, ring: DeviceRing, segment: int) -> None:
        self._ring, self._segment = ring, segment

    def __enter__(self) -> Bytes:
        self._use, data = self._ring.pin(self._segment)
        return data

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ring.unpin(self._use)


def _nothing() -> None:
    """A call that comes after those before it."""
