"""What the memory window counts: per-token figures for people, per-block seconds for the steady-state verdict."""

import time
from dataclasses import dataclass

from scheduler.timeline import Costs


@dataclass(frozen=True)
class WindowStats:
    """What happened since the last `MemoryWindow.take`. Take it once per token, and the figures are per token."""

    resident_bytes: int = 0  # bytes of memory of the blocks that stay
    ring_bytes: int = 0  # bytes of memory of the ring
    read_bytes: int = 0  # from disk
    read_seconds: float = 0.0  # time during which at least one read was in flight
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


class Meter:
    """Mutable counters behind `WindowStats`; what readers change, they change under their lock."""

    def __init__(self, blocks: int, resident_bytes: int, ring_bytes: int) -> None:
        self._blocks, self._resident, self._ring = blocks, resident_bytes, ring_bytes
        self.load_seconds = [0.0] * blocks  # of each block's last load
        self._left_at = 0.0
        self._flying = 0
        self._since = 0.0
        self._clear()

    def _clear(self) -> None:
        self.read_bytes = self.stalls = 0
        self.stall_seconds = self._read_seconds = 0.0
        self._counts, self._compute = [0] * self._blocks, [0.0] * self._blocks
        self._exchange = [0.0] * self._blocks
        self._last = -1

    def entered(self, begun: float) -> None:
        """A hold was asked for at `begun`: what lies between it and the last release is the exchange in between."""
        if self._last >= 0:
            self._exchange[self._last] += begun - self._left_at

    def left(self, block: int, entered: float, left: float) -> None:
        """A hold of `block` was entered and left at these times."""
        self._counts[block] += 1
        self._compute[block] += left - entered
        self._left_at, self._last = left, block

    def stall(self, seconds: float) -> None:
        """A hold waited."""
        self.stall_seconds += seconds
        self.stalls += 1

    def fly(self) -> None:
        """A read starts."""
        if not self._flying:
            self._since = time.perf_counter()
        self._flying += 1

    def land(self, size: int) -> None:
        """A read of `size` bytes is over."""
        self._flying -= 1
        self.read_bytes += size
        if not self._flying:
            self._read_seconds += time.perf_counter() - self._since

    def costs(self) -> Costs:
        """Mean seconds per block since the last `take`; loads are each block's last one, 0 where there was none."""
        per = [max(1, count) for count in self._counts]
        compute = [seconds / count for seconds, count in zip(self._compute, per, strict=True)]
        exchange = [seconds / count for seconds, count in zip(self._exchange, per, strict=True)]
        return Costs(compute, exchange, list(self.load_seconds))

    def take(self) -> WindowStats:
        """The counts so far, and start again."""
        if self._flying:
            now = time.perf_counter()
            self._read_seconds, self._since = self._read_seconds + now - self._since, now
        stats = WindowStats(
            self._resident,
            self._ring,
            self.read_bytes,
            self._read_seconds,
            self.stall_seconds,
            self.stalls,
            sum(self._counts),
        )
        self._clear()
        return stats
