"""The serial resources of an emulated node: a processor, one direction of a link, or a disk."""

from collections.abc import Callable
from threading import Lock
from typing import TypeVar

from tpi.devices.emulated.clock import EmulatedClock
from tpi.devices.emulated.stretch import StretchFactor

T = TypeVar("T")


class TimedLane:
    """A resource that runs one task at a time, in the order of the requests. Several threads may use it at once."""

    def __init__(self, name: str, clock: EmulatedClock, stretch: StretchFactor) -> None:
        self.name = name
        self.busy = 0.0  # seconds of tasks since the start, not stretched
        self.tasks = 0
        self.slowed = 1.0  # factor by which its tasks take longer, as if another process used it too
        self._clock, self._stretch = clock, stretch
        self._lock = Lock()
        self._free_at = 0.0

    @property
    def stretch(self) -> float:
        """Factor by which the seconds of tasks are multiplied."""
        return self._stretch.stretch

    def run(self, what: str, seconds: float, call: Callable[[], T]) -> T:
        """Return the result of `call` once its emulated task of `seconds` has ended.

        The task begins once it is requested and the lane is free; it takes `seconds` times `slowed` and the stretch.
        The real work is done first. If it takes longer than the task should, the lane is busy for as long as it took.
        `what` names the kind of task, for the calibration of the stretch.
        """
        begins, slot = self._take(seconds)
        real = self._clock.real
        started = real()
        result = call()
        worked = real() - started
        if seconds > 0:
            self._stretch.note(f"{self.name} {what}", worked, seconds)
        end = begins + max(slot, worked)
        with self._lock:
            self._free_at = max(self._free_at, end)
        self._clock.sleep_until(end)
        return result

    def _take(self, seconds: float) -> tuple[float, float]:
        """Reserve the lane for a task; return the task's begin and its duration in stretched seconds."""
        seconds *= self.slowed
        slot = seconds * self.stretch
        with self._lock:
            begins = max(self._clock.now(), self._free_at)
            self._free_at = begins + slot
            self.busy += seconds
            self.tasks += 1
        return begins, slot


class TimedLink:
    """A lane that moves bytes: a transfer of n bytes takes `latency + n / bytes_per_second` seconds."""

    def __init__(self, lane: TimedLane, bytes_per_second: float, latency: float = 0.0) -> None:
        self.lane = lane
        self.bytes_per_second = bytes_per_second
        self.latency = latency

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that a transfer of `nbytes` bytes takes by itself, not stretched."""
        return self.latency + nbytes / self.bytes_per_second

    def move(self, nbytes: int, call: Callable[[], T]) -> T:
        """Call `call`, which moves `nbytes` bytes, and return its result when the emulated transfer has ended."""
        return self.lane.run("move", self.seconds(nbytes), call)
