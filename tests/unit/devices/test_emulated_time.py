"""Emulated time: each lane is serial, lanes run in parallel, and waiting threads wake at the exact time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.devices.virtual_time import VirtualTime
from tests.support.kernels.kernel_cases import native
from tpi.devices.base import wait_all
from tpi.devices.emulated.device import EmulatedDevice
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.emulated.lane import TimedLane
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.emulated.stretch import StretchFactor
from tpi.devices.host import HostDevice
from tpi.devices.pages import PAGE
from tpi.errors import EmulationError, KernelError

PLAIN = f"{16 * PAGE}B,up={PAGE}B/s,down={2 * PAGE}B/s,latency=0s,launch=0s,stretch=1"


def emulation(text: str = PLAIN, late: float = 0.0) -> tuple[Emulation, VirtualTime]:
    time = VirtualTime(late)
    return Emulation(parse_emulated(text), real=time.real, sleep=time.sleep), time


def idle() -> None:
    """Do no work."""


def test_tasks_of_a_lane_add_up_and_idle_time_is_lost() -> None:
    emulated, time = emulation()
    for _ in range(4):
        emulated.compute.run("task", 0.5, idle)
    assert (time.real(), emulated.compute.busy, emulated.compute.tasks) == (2, 2, 4)
    time.pass_by(3)
    emulated.compute.run("task", 0.5, idle)
    assert time.real() == 5.5


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 4.0]), max_size=20), st.sampled_from([0.125, 0.5, 2.0]))
def test_delays_of_waking_up_do_not_add_up(tasks: list[float], late: float) -> None:
    emulated, time = emulation(late=late)
    for seconds in tasks:
        emulated.compute.run("task", seconds, lambda: time.pass_by(0.0625))
        assert 0 <= time.real() - emulated.clock.now() <= late
    assert emulated.clock.now() == sum(tasks)


def test_real_work_counts_only_where_it_exceeds_its_slot() -> None:
    emulated, time = emulation()
    emulated.compute.run("task", 1.0, lambda: time.pass_by(0.25))
    assert (time.real(), emulated.overruns) == (1, 0)
    emulated.compute.run("task", 1.0, lambda: time.pass_by(0.75))
    assert (time.real(), emulated.overruns) == (2, 1)
    emulated.compute.run("task", 1.0, lambda: time.pass_by(3))
    emulated.compute.run("task", 1.0, idle)
    assert (time.real(), emulated.overruns) == (6, 2)


def test_one_direction_is_serial_and_the_other_runs_beside_it() -> None:
    emulated, _ = emulation()
    device = EmulatedDevice(emulated, native)
    there, here = device.memory.allocate(4 * PAGE), np.ones(4 * PAGE, np.uint8)
    up = [device.copy(here, there), device.copy(here[:PAGE], there[:PAGE])]
    up[0].wait()
    assert emulated.clock.now() == 4
    down = device.copy(there, np.zeros_like(here))  # begins at 4, when the second copy up does
    up[1].wait()
    assert emulated.clock.now() == 5
    down.wait()
    assert emulated.clock.now() == 6
    assert [lane.busy for lane in (emulated.up.lane, emulated.down.lane)] == [5, 2]
    device.copy(there[:PAGE], there[PAGE : 2 * PAGE]).wait()
    assert emulated.clock.now() == 6 + 2 * PAGE / emulated.machine.memory
    device.close()


def test_computing_follows_what_it_waits_for_and_its_lane() -> None:
    emulated, _ = emulation()
    device = EmulatedDevice(emulated, native)
    there = device.memory.allocate(3 * PAGE)
    loaded = device.copy(np.ones(3 * PAGE, np.uint8), there)
    first = device.start(lambda: emulated.compute.run("task", 1.0, idle))
    second = device.start(lambda: (loaded.wait(), emulated.compute.run("task", 1.0, idle)))
    third = device.start(lambda: emulated.compute.run("task", 1.0, idle))
    wait_all([first])
    assert emulated.clock.now() == 1
    wait_all([second, third])
    assert emulated.clock.now() == 5  # the load until 3, then one after the other
    wait_all([first, second])
    assert emulated.clock.now() == 5
    device.close()


def test_a_started_task_begins_no_sooner_than_its_caller() -> None:
    emulated, time = emulation()
    device = EmulatedDevice(emulated, native)
    time.pass_by(7)
    device.start(lambda: emulated.compute.run("task", 1.0, idle)).wait()
    assert emulated.clock.now() == 8
    device.close()


def test_failures_are_raised_by_wait_and_later_work_runs() -> None:
    emulated, _ = emulation()
    device = EmulatedDevice(emulated, native)

    def fail() -> None:
        raise KernelError("broken")

    failed = device.start(lambda: emulated.compute.run("task", 1.0, fail))
    after = device.start(lambda: emulated.compute.run("task", 1.0, lambda: 5))
    for _ in range(2):
        with pytest.raises(KernelError, match="broken"):
            failed.wait()
    assert after.wait() == 5
    assert failed.done
    device.close()


def test_one_factor_stretches_all_emulated_times() -> None:
    emulated, time = emulation(PLAIN.replace("stretch=1", "stretch=auto"))
    for took in (0.5, 3.0, 0.5):  # of one kind: it is the median that counts
        emulated.compute.run("task", 0.25, lambda took=took: time.pass_by(took))  # type: ignore[misc]
    emulated.disk.lane.run("move", 1.0, lambda: time.pass_by(0.5))
    assert emulated.overruns == 0
    assert emulated.calibrate() == emulated.stretch == 2 * 2 * (0.5 / 0.25)
    assert emulated.calibrate() == 8
    before = time.real()
    emulated.compute.run("task", 0.25, lambda: time.pass_by(0.5))
    emulated.disk.lane.run("move", 1.0, lambda: time.pass_by(0.5))
    assert time.real() - before == 8 * 1.25
    assert emulated.emulated_seconds(time.real() - before) == 1.25
    emulated.check()
    assert emulated.overruns == 0


def test_work_that_is_quick_is_not_sped_up() -> None:
    emulated, time = emulation(PLAIN.replace("stretch=1", "stretch=auto"))
    emulated.compute.run("task", 1.0, lambda: time.pass_by(0.001))
    assert emulated.calibrate() == 1


def test_a_stretch_that_is_given_stays() -> None:
    emulated, time = emulation(PLAIN.replace("stretch=1", "stretch=4"))
    emulated.compute.run("task", 1.0, lambda: time.pass_by(3))
    assert (time.real(), emulated.calibrate(), emulated.overruns) == (4, 4, 1)


def test_a_run_that_overran_is_rejected() -> None:
    time, pace = VirtualTime(), StretchFactor(4)
    emulated = Emulation(parse_emulated(PLAIN), real=time.real, sleep=time.sleep)
    lane = TimedLane("compute", emulated.clock, pace)
    for took in (2, 2, 2, 2.5):
        lane.run("task", 1.0, lambda took=took: time.pass_by(took))  # type: ignore[misc]
    assert (pace.overruns, pace.tasks, pace.worst) == (1, 4, 2.5 / 4)
    pace.check(allowed=0.25)
    with pytest.raises(EmulationError, match=r"1 of 4 .* stretch=8,"):
        pace.check()


def test_nothing_can_be_calibrated_before_it_ran() -> None:
    with pytest.raises(EmulationError, match="rehearse"):
        emulation(PLAIN.replace("stretch=1", "stretch=auto"))[0].calibrate()


def test_accelerators_of_a_node_share_host_disk_and_stretch() -> None:
    first, time = emulation()
    second = Emulation(parse_emulated(PLAIN), first)
    assert second.stretch_factor is first.stretch_factor
    assert second.clock is first.clock
    assert second.disk is first.disk
    assert second.compute is not first.compute
    hosts = [each.host(HostDevice(native)) for each in (first, second)]
    data = np.zeros(PAGE, np.uint8)
    for host in hosts:
        host.copy(data, host.staging(PAGE)).wait()
    assert first.processor.tasks == 2
    assert time.real() == pytest.approx(4 * PAGE / first.machine.host_memory)
