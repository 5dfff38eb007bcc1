"""What the memory window counts: per-token figures for people, per-block seconds for the steady-state verdict."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model.timeline import Costs

SAMPLES = 15  # of each block's last seconds, of which the median counts: a prefill step or a hiccup does not


@dataclass(frozen=True)
class WindowPosition:
    """Where a window stands in its cycle of `blocks` that stream: number `following` comes next, and from it on `ready`
    are in memory. Without any, everything stays.
    """

    following: int = 0
    ready: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class WindowStats:
    """What happened since the last `MemoryWindow.take`. Take it once per token, and the figures are per token."""

    resident_bytes: int = 0  # bytes of memory of the blocks that stay
    ring_bytes: int = 0  # bytes of memory of the ring
    read_bytes: int = 0  # from disk
    read_seconds: float = 0.0  # time during which at least one read was in flight, of any window with this `ReadClock`
    stall_seconds: float = 0.0  # time that `hold` waited for a block
    stalls: int = 0  # holds that waited
    holds: int = 0

    def __add__(self, other: "WindowStats") -> "WindowStats":
        """Both together; memory sizes are the later ones'."""
        return WindowStats(
            other.resident_bytes,
            other.ring_bytes,
            self.read_bytes + other.read_bytes,
            self.read_seconds + other.read_seconds,
            self.stall_seconds + other.stall_seconds,
            self.stalls + other.stalls,
            self.holds + other.holds,
        )

    @property
    def disk_speed(self) -> float:
        """Bytes per second while reading, 0 if nothing was read."""
        return self.read_bytes / self.read_seconds if self.read_seconds else 0.0


class ReadClock:
    """Seconds during which at least one read was in flight, of all windows that share it. Safe from several threads."""

    def __init__(self) -> None:
        self._flying = 0
        self._since = self._seconds = 0.0
        self._lock = threading.Lock()

    def fly(self) -> None:
        """A read starts."""
        with self._lock:
            if not self._flying:
                self._since = time.perf_counter()
            self._flying += 1

    def land(self) -> None:
        """A read is over."""
        with self._lock:
            self._flying -= 1
            if not self._flying:
                self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Since the start, until now."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._flying else 0.0)


class Meter:
    """Mutable counters behind `WindowStats`; what readers change, they change under their lock."""

    def __init__(self, blocks: int, resident_bytes: int, ring_bytes: int, reads: ReadClock | None = None) -> None:
        self._resident, self._ring = resident_bytes, ring_bytes
        self._reads = reads or ReadClock()
        self._read_before = self._reads.seconds
        self._compute, self._exchange, self._load = (
            [deque[float](maxlen=SAMPLES) for _ in range(blocks)] for _ in range(3)
        )
        self._wakes = deque[list[float]]([[]], maxlen=SAMPLES)  # a list per pass over the blocks
        self._left_at, self._last = 0.0, -1
        self.total_bytes = 0  # ever read
        self._clear()

    def _clear(self) -> None:
        self.read_bytes = self.stalls = self.holds = 0
        self.stall_seconds = 0.0

    def entered(self, block: int, begun: float) -> None:
        """A hold of `block` was asked for at `begun`; what lies between it and the last release is an exchange.

        A block that does not come after the last one begins another pass, that is a token.
        """
        if self._last >= 0:
            self._exchange[self._last].append(begun - self._left_at)
        if block <= self._last:
            self._wakes.append([])

    def left(self, block: int, entered: float, left: float) -> None:
        """A hold of `block` was entered and left at these times."""
        self.holds += 1
        self._compute[block].append(left - entered)
        self._left_at, self._last = left, block

    def stall(self, seconds: float) -> None:
        """A hold waited."""
        self.stall_seconds += seconds
        self.stalls += 1

    def woke(self, seconds: float) -> None:
        """A hold that waited went on so long after its block had been loaded."""
        self._wakes[-1].append(seconds)

    def fly(self) -> None:
        """A read starts."""
        self._reads.fly()

    def land(self, size: int) -> None:
        """A read of `size` bytes is over."""
        self._reads.land()
        self.read_bytes += size
        self.total_bytes += size

    def loaded(self, block: int, seconds: float) -> None:
        """A block was loaded, which took the loader this long."""
        self._load[block].append(seconds)

    def costs(self) -> Costs:
        """Median seconds per block over the last tokens, 0 where nothing was measured."""
        from statistics import median  # asked for at a run's end; a worker that waits needs no fractions

        compute, exchange, load = (
            [median(samples) if samples else 0.0 for samples in list(map(list, blocks))]
            for blocks in (self._compute, self._exchange, self._load)
        )
        return Costs(compute, exchange, load, median(list(filter(None, self._waking())) or [0.0]))

    def history(self) -> list[Costs]:
        """Seconds per block of each of the last tokens, the latest last; where a block lacks some, the median."""
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
        """The mean of each pass, since most wake up at once and a few late; 0 if nothing waited."""
        return [sum(each) / len(each) if each else 0.0 for each in map(list, list(self._wakes))]

    def take(self) -> WindowStats:
        """The counts so far, and start again. Call it under the readers' lock: nothing may be counted in between."""
        seconds = self._reads.seconds
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
    """Samples of each block, as those of each token: `SAMPLES` lists of a value per block."""
    full = [
        samples if len(samples) == SAMPLES else [each] * SAMPLES for samples, each in zip(blocks, usual, strict=True)
    ]
    return [list(values) for values in zip(*full, strict=True)]
