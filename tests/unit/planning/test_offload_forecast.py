"""Forecasts and crossovers, compared with closed forms and with a scan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.machine import Accelerator, DeviceLink, DiskRate, NodeMachine, Rates
from scheduler.model.offload.choice import choose
from scheduler.model.offload.crossover import crossover
from scheduler.model.offload.forecast import deepened, forecast, gains
from scheduler.model.offload.memory import Needs, peaks
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.tasks import Candidates, Tasks
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import PIPELINES, PLACES, NodeWork, Pipeline, SegmentWork, StepSize, Workload
from tests.support.devices.offload_cases import MACHINE, layers, offload

SEGMENT = SegmentWork(0, "ffn", 600, 1000)
DEVICE = Accelerator(Rates(1e4, 1e7), 1000, DeviceLink(20.0, 20.0, piece=600))
NODE = NodeMachine(Rates(100.0, 1e4), 1000, DiskRate(50.0), DEVICE)


def test_the_crossover_is_where_host_and_link_take_equally_long() -> None:
    """Copying 600 bytes takes 30 s.

    The host needs 0.2 s for 2000 operations a token: from 151 tokens on, copying is faster.
    """
    assert crossover(SEGMENT, NODE, "ram") == 151


def test_without_overlap_computing_there_comes_on_top() -> None:
    """30 s for copying, and 0.06 s for computing few tokens on the accelerator."""
    assert crossover(SEGMENT, NODE, "ram", "memory") == 151
    slow = replace(NODE, accelerator=replace(DEVICE, rates=Rates(100.0, 1e7)))
    assert crossover(SEGMENT, slow, "ram", "memory") == 181


def test_disk_weights_cross_over_where_computing_is_slower() -> None:
    """The disk takes 12 s, the link 30 s: the result is that for RAM until the link is faster than the disk."""
    assert crossover(SEGMENT, NODE, "disk") == 151
    fast = replace(NODE, accelerator=replace(DEVICE, link=DeviceLink(1e3, 1e3, piece=10)))
    found = crossover(SEGMENT, fast, "disk")
    assert found is not None
    assert 1 < found <= 61


def test_a_link_that_is_faster_than_the_hosts_memory_always_pays() -> None:
    fast = replace(NODE, accelerator=replace(DEVICE, link=DeviceLink(1e3, 1e3)))
    assert crossover(SEGMENT, fast, "ram") == 1


def test_there_is_none_without_an_accelerator_or_on_a_slower_one() -> None:
    assert crossover(SEGMENT, replace(NODE, accelerator=None), "ram") is None
    slow = replace(NODE, accelerator=replace(DEVICE, rates=Rates(1e4, 1e3)))
    assert crossover(SEGMENT, slow, "ram") is None


SPEED = st.sampled_from([20.0, 60.0, 100.0, 300.0, 1e3])
OPERATIONS = st.sampled_from([1e5, 4e5, 1e6, 1e7])


def faster_there(machine: NodeMachine, tokens: int, pipeline: Pipeline) -> bool:
    """Return True if four equal segments take less time on the accelerator."""
    work = NodeWork(tuple(replace(SEGMENT, block=number) for number in range(4)), 0)
    both = [offload(["ram"] * 4, [place] * 4, pipeline=pipeline) for place in PLACES]
    tasks = Tasks.of(work, machine, StepSize(tokens, 1, tokens))
    times = simulate_steps(tasks, Candidates.of(work, both, "prompt"), work.blocks, pipeline, 3).steps[-1]
    return bool(times[1] < times[0] * (1 - 1e-6))


@settings(deadline=None, max_examples=40)
@given(SPEED, OPERATIONS, SPEED, OPERATIONS, SPEED, st.sampled_from(PIPELINES))
def test_halving_finds_what_a_scan_finds(
    read: float, operations: float, there: float, more: float, link: float, pipeline: Pipeline
) -> None:
    """The machines have an accelerator that is faster than the host."""
    device = Accelerator(Rates(max(read, there), max(4 * operations, more)), 1000, DeviceLink(link, link, piece=10))
    machine = NodeMachine(Rates(read, operations), 1000, DiskRate(50.0), device)
    found = crossover(SEGMENT, machine, "ram", pipeline)
    scanned = [faster_there(machine, tokens, pipeline) for tokens in range(1, 100)]
    expected = scanned.index(True) + 1 if any(scanned) else None
    assert found == expected or (expected is None and (found is None or found >= 100))
    assert all(scanned[(expected or 100) - 1 :])


PROBLEM = Problem(layers(4), replace(MACHINE, memory=2400, bus=100.0), Workload(8, 4, 1, 32), Needs(1))


def test_a_forecast_is_the_long_run() -> None:
    """Everything is in RAM and computed by the host: 1600 bytes at 100 bytes a second in each step."""
    found = forecast(PROBLEM, offload(["ram"] * 8))
    assert found.decode.seconds == pytest.approx(16)
    assert found.decode.rate == pytest.approx(1 / 16)
    assert found.decode.use["host"] == pytest.approx(1)
    assert found.decode.bottleneck == "host"
    assert found.ttft == pytest.approx(16)
    assert found.prompt.rate == pytest.approx(8 / 16)


def test_room_that_is_left_evens_out_segments_of_unequal_size() -> None:
    """Computing hides all loads together, but not each load by the segment before it.

    With two slots a step waits, with four it does not.
    """
    assert MACHINE.accelerator is not None
    device = Accelerator(Rates(200.0, 1e12), 1000, DeviceLink(210.0, 200.0, piece=10))
    problem = replace(PROBLEM, machine=replace(MACHINE, accelerator=device))
    two = offload(["ram"] * 8, ["accelerator"] * 8)
    four = deepened(problem, two)
    assert four.slots == 4
    assert peaks(problem.work, four, problem.request, problem.needs, problem.chunk).accelerator.slots == 800
    times = [forecast(problem, each).decode.seconds for each in (two, four)]
    assert times[0] > 1.2 * times[1]
    assert times[1] == pytest.approx(1600 / 200, rel=0.02)
    small = replace(problem, machine=replace(MACHINE, accelerator=replace(device, memory=720)))
    assert deepened(small, two).slots == 3
    assert deepened(small, replace(two, pipeline="memory")).slots == 0


def test_the_slowest_link_is_the_bottleneck() -> None:
    found = forecast(PROBLEM, offload(["disk"] * 8, ["accelerator"] * 8))
    assert found.decode.bottleneck == "disk"
    assert found.decode.seconds == pytest.approx(1600 / 50)
    assert found.decode.use["up"] == pytest.approx(1600 / 200 / 32)


def test_a_chain_starts_once_and_the_card_computes_the_head_too() -> None:
    """By hand: 5.6 s for the blocks, 2.6 to start them and to copy 40 bytes each way, 6.2 for the head there."""
    assert MACHINE.accelerator is not None
    device = replace(MACHINE.accelerator, rates=Rates(1000.0, 1e12, start=2.0), follow=0.5)
    work = replace(layers(4, head=800), crossing=40)
    problem = replace(PROBLEM, work=work, machine=replace(MACHINE, accelerator=device), chains=True)
    found = choose(problem).offload
    assert (found.on_card, found.head) == (True, "gpu")
    assert forecast(problem, found).decode.seconds == pytest.approx(5.6 + 2.6 + 6.2)
    assert peaks(work, found, problem.request, problem.needs, problem.chunk).accelerator.other == 800
    tight = replace(problem, machine=replace(MACHINE, accelerator=replace(device, memory=2300)))
    assert choose(tight).offload.head == "ram"
    single = forecast(replace(problem, chains=False), replace(found, head="ram"))
    assert single.decode.seconds > 8 * 2.0 + 8.0  # a start for each block, and the head on the host


@settings(deadline=None, max_examples=20)
@given(st.integers(900, 4000), st.integers(100, 2000), st.sampled_from([20.0, 200.0]))
def test_no_lane_is_busy_for_longer_than_a_step(memory: int, gpu_memory: int, speed: float) -> None:
    assert MACHINE.accelerator is not None
    device = replace(MACHINE.accelerator, memory=gpu_memory, link=DeviceLink(speed, speed, piece=10))
    problem = replace(PROBLEM, machine=replace(PROBLEM.machine, memory=memory, accelerator=device))
    found = forecast(problem, choose(problem).offload)
    for phase in (found.prompt, found.decode):
        assert all(0 <= part <= 1 for part in phase.use.values())


def test_more_memory_helps_where_it_is_what_lacks() -> None:
    """Half of the weights fit into RAM, the disk is slow, and the accelerator is too small for any segment."""
    assert MACHINE.accelerator is not None
    small = replace(MACHINE, memory=1100, accelerator=replace(MACHINE.accelerator, memory=1))
    problem = replace(PROBLEM, machine=small)
    chosen = choose(problem)
    found = {gain.thing: gain.faster for gain in gains(problem, chosen)}
    assert next(iter(found)) in ("RAM", "disk speed")
    assert found["RAM"] > 1.3
    assert found["disk speed"] > 1.3
    assert found["link speed"] == 1
    assert all(faster >= 1 for faster in found.values())


def test_gains_of_a_node_without_an_accelerator_are_the_hosts() -> None:
    problem = replace(PROBLEM, machine=replace(PROBLEM.machine, accelerator=None))
    assert {gain.thing for gain in gains(problem, choose(problem))} == {"RAM", "disk speed", "RAM speed", "CPU speed"}
