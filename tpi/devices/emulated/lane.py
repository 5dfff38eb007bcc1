"""What does one emulated task after the other: a processor, one direction of a link, a disk."""

from collections.abc import Callable
from threading import Lock
from typing import TypeVar

from tpi.devices.emulated.clock import EmulatedClock
from tpi.devices.emulated.pace import Pace

T = TypeVar("T")


class TimedLane:
    """A serial resource. May be used by several threads, who are served in the order in which they ask."""

    def __init__(self, name: str, clock: EmulatedClock, pace: Pace) -> None:
        self.name = name
        self.busy = 0.0  # seconds of tasks since the start, not stretched
        self.tasks = 0
        self.slowed = 1.0  # by which factor its tasks take longer: another process has a part of it
        self._clock, self._pace = clock, pace
        self._lock = Lock()
        self._free_at = 0.0

    @property
    def stretch(self) -> float:
        """What the seconds of tasks are multiplied by."""
        return self._pace.stretch

    def run(self, what: str, seconds: float, call: Callable[[], T]) -> T:
        """What `call` returns, no sooner than `seconds` (to be stretched) after the lane was free and this was asked.

        The real work is done first. Where it takes longer than the task may, the lane is busy for as long as it took.
        """
        begins, slot = self._take(seconds)
        real = self._clock.real
        started = real()
        result = call()
        worked = real() - started
        if seconds > 0:
            self._pace.note(f"{self.name} {what}", worked, seconds)
        end = begins + max(slot, worked)
        with self._lock:
            self._free_at = max(self._free_at, end)
        self._clock.be_at(end)
        return result

    def _take(self, seconds: float) -> tuple[float, float]:
        """When the task begins, and how long it takes."""
        seconds *= self.slowed
        slot = seconds * self.stretch
        with self._lock:
            begins = max(self._clock.now(), self._free_at)
            self._free_at = begins + slot
            self.busy += seconds
            self.tasks += 1
        return begins, slot


class TimedLink:
    """A lane that bytes move along: `seconds` after its `latency`, one begins to move `bytes_per_second`."""

    def __init__(self, lane: TimedLane, bytes_per_second: float, latency: float = 0.0) -> None:
        self.lane = lane
        self.bytes_per_second = bytes_per_second
        self.latency = latency

    def seconds(self, nbytes: int) -> float:
        """How long a move of so many bytes takes alone, not stretched."""
        return self.latency + nbytes / self.bytes_per_second

    def move(self, nbytes: int, call: Callable[[], T]) -> T:
        """What `call` returns, which moves so many bytes, when they are there."""
        return self.lane.run("move", self.seconds(nbytes), call)
