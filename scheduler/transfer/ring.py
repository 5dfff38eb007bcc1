"""A ring in accelerators' memory through which segments pass, loaded from the tier below ahead of their use.

Its arithmetic is that of the memory window (`scheduler.model.ring`, `scheduler.slots.cycle`): the size of the ring
decides how far loading runs ahead. With room for two neighbours, the next segment is loaded while one is computed
(PIPO's performance pipeline). With room for one, a segment is loaded after the previous one is released (the memory
pipeline).

A ring may span the memories of several accelerators (`scheduler.transfer.merge`). Segments are then requested in the
order of use, whichever accelerator they go to, and all links work at once. Segments that the tier below streams are
read one after the other in that order, because the tier has a single reader.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from scheduler.model.ring import Ring
from scheduler.slots.cache import SlotCache, Source
from scheduler.slots.cyclic import CyclicShelf
from scheduler.slots.shelf import Load
from scheduler.slots.stats import LoadStats
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.workers import QueueWorkers
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.trace import OFF, NoTrace

Fill = Callable[[Bytes], None]
"""Function that fills a segment's place in the accelerator's memory, in order, and returns when it is full."""


@dataclass(frozen=True)
class RingSegment:
    """One segment of a node's weights that passes through the ring."""

    name: str  # its name in traces and errors
    nbytes: int
    fill: Fill
    card: int = 0  # the accelerator that it goes to: the number of the ring's part
    in_turn: bool = False  # True if the tier below streams it, so that it must be loaded in the order of use


@dataclass(frozen=True)
class RingPart:
    """The memory of the ring on one accelerator."""

    device: Device
    memory: Bytes  # at least as large as the ring's part on this accelerator


class SegmentShelf(CyclicShelf, Source):
    """The segments of a ring, and the source that loads them.

    A segment is loaded to the offset that the ring gives it, in the memory of the accelerator that it goes to.
    """

    def __init__(self, parts: Sequence[RingPart], ring: Ring, contents: Mapping[int, RingSegment]) -> None:
        super().__init__(ring)
        self._contents = contents
        self.slots = [self._slot(parts, *place) for place in zip(ring.blocks, ring.offsets, strict=True)]

    def name_of(self, unit: int) -> str:
        """Return the name of the segment `unit`, for messages and traces."""
        return self._contents[unit].name

    def load_of(self, use: int, place: int) -> Load:
        """Return the load of use number `use`, over the link of the accelerator that it goes to."""
        contents = self._contents[self._units[place]]
        title, lane, in_turn = contents.name, contents.card, contents.in_turn
        return Load(self, use, place, title=title, lane=lane, in_turn=in_turn)

    def card_of(self, use: int) -> int:
        """Return the number of the accelerator on which use number `use` lies."""
        return self._contents[self._units[use % self.cycle.period]].card

    def fill(self, loads: Sequence[Load], part: int) -> int:
        """Fill the memory of one load, and return its size in bytes. Errors are those of the segment's `fill`."""
        (load,) = loads
        place: int = load.slots
        self._contents[self._units[place]].fill(self.slots[place])
        return self.slots[place].size

    def _slot(self, parts: Sequence[RingPart], segment: int, offset: int) -> Bytes:
        contents = self._contents[segment]
        return parts[contents.card].memory[offset : offset + contents.nbytes]


class DeviceRing:
    """The ring of a node's accelerators. Only one thread may hold segments.

    The memory of a released segment is overwritten only after its device has made the calls that use the segment. The
    other rules of holds, loads and failures are those of `scheduler.slots.cache.SlotCache`. A new ring loads nothing
    until `resume`.
    """

    def __init__(
        self,
        parts: Sequence[RingPart],
        ring: Ring,
        contents: Mapping[int, RingSegment],
        queue: TransferQueue,
        trace: NoTrace = OFF,
    ) -> None:
        """Create a ring; segment n is `contents[n]`, in the memory of its accelerator, at the ring's offset.

        Args:
            parts: the ring's memory on each accelerator.
            ring: the layout.
            contents: each segment by its number.
            queue: where loads are submitted.
            trace: recorder of stalls.
        """
        self.devices = [part.device for part in parts]
        self.shelf = SegmentShelf(parts, ring, contents)
        self.slots = SlotCache(self.shelf, QueueWorkers(queue), LoadStats(), trace=trace, devices=self.devices)

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were loaded since the start."""
        return self.slots.loaded_bytes

    @property
    def stall_seconds(self) -> float:
        """Seconds that holds waited since the start."""
        return self.slots.stats.stall_seconds

    def hold(self, segment: int) -> "RingHold":
        """Return a context manager that yields the bytes of `segment` in the accelerator's memory.

        Raises:
            WeightsError: if the segment could not be loaded; the message names the file.
            TpiError: if held segments leave no room in the ring, or the queue is closed.
        """
        return RingHold(self, segment)

    def resume(self) -> None:
        """Start loading ahead, from the next use."""
        with self.slots.lock:
            self.slots.submit(self.shelf.resume(), ahead=True)

    def pause(self) -> None:
        """Stop loading and forget segments that were loaded ahead. The ring's memory may then serve another purpose."""
        self.wait_idle()
        with self.slots.lock:
            self.shelf.pause()

    def wait_idle(self) -> None:
        """Wait until no load is in flight, so that other code may use the tier below. Loaded segments stay."""
        self.slots.flush_releases()
        self.slots.drain()

    def abandon(self) -> None:
        """Abort the step; a segment that failed to load is loaded again when it is needed next."""
        self.wait_idle()
        self.slots.abandon()


class RingHold:
    """The context manager that `DeviceRing.hold` returns."""

    __slots__ = ("_ring", "_segment", "_use")

    def __init__(self, ring: DeviceRing, segment: int) -> None:
        self._ring, self._segment = ring, segment

    def __enter__(self) -> Bytes:
        shelf, slots = self._ring.shelf, self._ring.slots
        use: int = slots.enter(shelf, (self._segment,))
        self._use = use
        return shelf.slots[use % shelf.cycle.period]

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        ring = self._ring
        ring.slots.release(ring.shelf, self._use, ring.devices[ring.shelf.card_of(self._use)])
