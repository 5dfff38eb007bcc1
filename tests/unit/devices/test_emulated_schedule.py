"""A schedule on an emulated device ends when the recurrence says, however late its threads run."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tests.support.devices.virtual_time import VirtualTime
from tests.support.kernels.kernel_cases import native
from tpi.devices.base import Pending
from tpi.devices.emulated.device import EmulatedDevice
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.emulated.thread import TimedThread

LANES = ("compute", "up", "down")


@dataclass(frozen=True)
class Planned:
    """A task: its lane, its duration, earlier tasks that it waits for (counted back), and what is reported."""

    lane: str
    seconds: float
    after: tuple[int, ...]
    awaited: bool  # by the thread that gives out tasks, before it goes on


TASKS = st.builds(
    Planned,
    lane=st.sampled_from(LANES),
    seconds=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    after=st.lists(st.integers(1, 6), max_size=2).map(tuple),
    awaited=st.booleans(),
)


def expected_ends(tasks: list[Planned], stretch: float) -> list[float]:
    """Return the ends of tasks: each begins once it is given, its lane is free, and the tasks before it have ended."""
    ends: list[float] = []
    free, given_at = dict.fromkeys(LANES, 0.0), 0.0
    for task in tasks:
        before = [ends[-back] for back in task.after if back <= len(ends)]
        end = max(given_at, free[task.lane], *before, 0.0) + stretch * task.seconds
        ends.append(end)
        free[task.lane] = end
        given_at = max(given_at, end) if task.awaited else given_at
    return ends


@given(st.lists(TASKS, max_size=16), st.sampled_from([0.0, 0.125, 3.0]), st.sampled_from([1, 4]))
def test_tasks_end_when_the_recurrence_says(tasks: list[Planned], late: float, stretch: int) -> None:
    time = VirtualTime(late)
    emulation = Emulation(parse_emulated(f"1MiB,stretch={stretch}"), real=time.real, sleep=time.sleep)
    with closing(EmulatedDevice(emulation, native)) as device, closing(_Threads(device)) as threads:
        started: list[Pending[float]] = []
        for task in tasks:
            before = [started[-back] for back in task.after if back <= len(started)]
            started.append(threads.start(task, before))
            if task.awaited:
                started[-1].wait()
        assert [each.wait() for each in started] == expected_ends(tasks, stretch)


class _Threads:
    """The device's own compute thread, and a thread for each direction of its link."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device, self._emulation = device, device.emulation
        self._copying = {name: TimedThread(name, device.emulation.clock) for name in ("up", "down")}

    def start(self, task: Planned, before: list[Pending[float]]) -> Pending[float]:
        lanes = {lane.name: lane for lane in self._emulation.lanes}

        def call() -> float:
            for each in before:
                each.wait()
            lanes[task.lane].run("task", task.seconds, lambda: None)
            return self._emulation.clock.now()

        start: Callable[[Callable[[], float]], Pending[float]]
        start = self._device.start if task.lane == "compute" else self._copying[task.lane].start
        return start(call)

    def close(self) -> None:
        for thread in self._copying.values():
            thread.close()
