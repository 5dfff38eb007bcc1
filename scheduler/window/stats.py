"""The counters of a memory window: figures per token for reports, seconds per block for the steady-state verdict."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model.timeline import Costs
from scheduler.slots.stats import LoadStats, ReadClock

SAMPLES = 15  # times remembered of each block; their median hides a prefill step or a single disturbance


@dataclass(frozen=True)
class WindowPosition:
    """The position of a window in its cycle of streamed blocks.

    Attributes:
        following: the position in the cycle of the block that is used next.
        ready: how many blocks, from `following` on, are in memory.
        blocks: how many blocks are streamed; 0 if all are resident.
    """

    following: int = 0
    ready: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class WindowStats:
    """Counts since the last `MemoryWindow.take`: counts per token if `take` is called once per token."""

    resident_bytes: int = 0  # bytes of the resident blocks
    ring_bytes: int = 0  # bytes of the ring
    read_bytes: int = 0  # bytes read from disk
    read_seconds: float = 0.0  # time with at least one read in flight, in any window with this `ReadClock`
    stall_seconds: float = 0.0  # time that `hold` waited for a block
    stalls: int = 0  # holds that waited
    holds: int = 0  # all holds

    def __add__(self, other: "WindowStats") -> "WindowStats":
        """Add the counts of two windows; memory sizes come from `other`, the later one."""
        return WindowStats(
            other.resident_bytes,
            other.ring_bytes,
            self.read_bytes + other.read_bytes,
            self.read_seconds + other.read_seconds,
            self.stall_seconds + other.stall_seconds,
            self.stalls + other.stalls,
            self.holds + other.holds,
        )


class Meter(LoadStats):
    """Mutable counters behind `WindowStats`. Counters of loads are changed only under the cache's lock."""

    def __init__(self, blocks: int, resident_bytes: int, ring_bytes: int, reads: ReadClock | None = None) -> None:
        self._resident, self._ring = resident_bytes, ring_bytes
        super().__init__()
        self.reads = reads or ReadClock()
        self._read_before = self.reads.seconds
        self._compute, self._exchange, self._load = (
            [deque[float](maxlen=SAMPLES) for _ in range(blocks)] for _ in range(3)
        )
        self._wakes = deque[list[float]]([[]], maxlen=SAMPLES)  # a list per pass over the blocks
        self._left_at, self._last = 0.0, -1
        self._clear()

    def _clear(self) -> None:
        self.read_bytes = self.stalls = self.holds = 0
        self.stall_seconds = 0.0

    def entered(self, block: int, begun: float) -> None:
        """Record that a hold of `block` was requested at the time `begun`, in seconds.

        The time since the last release counts as an exchange. If the number `block` is not above that of the last hold,
        a new pass over the blocks has begun, that is, a new token.
        """
        if self._last >= 0:
            self._exchange[self._last].append(begun - self._left_at)
        if block <= self._last:
            self._wakes.append([])

    def left(self, block: int, entered: float, left: float) -> None:
        """Record that a hold of `block` was entered and left at the times `entered` and `left`, in seconds."""
        self.holds += 1
        self._compute[block].append(left - entered)
        self._left_at, self._last = left, block

    def waited(self, seconds: float) -> None:
        """Count a hold that waited for a load.

        `seconds` is the wake-up time: from the end of the load, or from the start of the wait if that is later, until
        the waiting thread ran again.
        """
        self.stalls += 1
        self._wakes[-1].append(seconds)

    def loaded(self, block: int, seconds: float) -> None:
        """Record that the loader took `seconds` for a block."""
        self._load[block].append(seconds)

    def costs(self) -> Costs:
        """Return the median seconds per block over the last tokens; 0 where nothing was measured."""
        from statistics import median  # needed only at the end of a run; the import takes memory

        compute, exchange, load = (
            [median(samples) if samples else 0.0 for samples in list(map(list, blocks))]
            for blocks in (self._compute, self._exchange, self._load)
        )
        return Costs(compute, exchange, load, median(list(filter(None, self._waking())) or [0.0]))

    def history(self) -> list[Costs]:
        """Return the seconds per block of each of the last tokens, the latest last.

        A block with fewer samples than tokens has its median for all of them.
        """
        typical = self.costs()
        compute, exchange, load = (
            _by_token(list(map(list, blocks)), usual)
            for blocks, usual in (
                (self._compute, typical.compute),
                (self._exchange, typical.exchange),
                (self._load, typical.load),
            )
        )
        wakes = [wake or typical.wake for wake in self._waking()]
        (wake,) = zip(*_by_token([wakes], [typical.wake]), strict=True)
        return [Costs(*each) for each in zip(compute, exchange, load, wake, strict=True)]

    def _waking(self) -> list[float]:
        """Return the mean wake-up seconds of waiting holds, for each pass over the blocks; 0 if no hold waited.

        A median would hide a few late wake-ups.
        """
        return [sum(each) / len(each) if each else 0.0 for each in map(list, list(self._wakes))]

    def take(self) -> WindowStats:
        """Return the counts since the last call, and reset them.

        The caller holds the readers' lock, so that nothing is counted in between.
        """
        seconds = self.reads.seconds
        stats = WindowStats(
            self._resident,
            self._ring,
            self.read_bytes,
            seconds - self._read_before,
            self.stall_seconds,
            self.stalls,
            self.holds,
        )
        self._read_before = seconds
        self._clear()
        return stats


def _by_token(blocks: Sequence[Sequence[float]], usual: Sequence[float]) -> list[list[float]]:
    """Return one list for each of the last `SAMPLES` tokens, with a value for each block.

    `blocks` has the samples of each block. A block with fewer than `SAMPLES` gets its value in `usual` for all tokens.
    """
    full = [
        samples if len(samples) == SAMPLES else [each] * SAMPLES for samples, each in zip(blocks, usual, strict=True)
    ]
    return [list(values) for values in zip(*full, strict=True)]
