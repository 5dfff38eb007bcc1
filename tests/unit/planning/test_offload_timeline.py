"""The timeline of a host and an accelerator, compared with figures by hand and with a simple simulation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.tasks import Candidates, Tasks, bound
from scheduler.model.offload.timeline import simulate_steps
from scheduler.model.offload.work import TIERS, NodeWork, Offload, Place, StepSize, Tier
from tests.support.devices.offload_cases import MACHINE, layers, offload, plain_ends

TOKEN = StepSize(1, 1, 1)


def steps(
    work: NodeWork, chosen: Offload, count: int, machine: NodeMachine = MACHINE, size: StepSize = TOKEN
) -> list[float]:
    candidates = Candidates.of(work, [chosen], "decode")
    tasks = Tasks.of(work, machine, size)
    found: list[float] = simulate_steps(tasks, candidates, work.blocks, chosen.pipeline, count).steps[:, 0].tolist()
    return found


def test_all_in_ram_is_bytes_over_the_memory_of_the_host() -> None:
    assert steps(layers(3), offload(["ram"] * 6), 2) == pytest.approx([12, 12])


def test_all_on_the_accelerator_is_bytes_over_its_memory() -> None:
    assert steps(layers(3), offload(["gpu"] * 6), 2) == pytest.approx([1.2, 1.2])


def test_streaming_from_ram_takes_the_time_of_the_link() -> None:
    """100 bytes take 0.5 s, 300 bytes 1.5 s. Only computing the last segment, 0.3 s, is not hidden by a load."""
    found = steps(layers(3), offload(["ram"] * 6, ["accelerator"] * 6), 3)
    assert sum(found) == pytest.approx(3 * 6 + 0.3)


def test_the_memory_pipeline_adds_what_the_other_hides() -> None:
    found = steps(layers(3), offload(["ram"] * 6, ["accelerator"] * 6, pipeline="memory"), 2)
    assert found == pytest.approx([6 + 1.2, 6 + 1.2])


def test_from_disk_the_pieces_follow_one_another_up() -> None:
    """300 bytes take 6 s from disk. The last piece of 10 bytes is copied 0.05 s later, then computing takes 0.3 s."""
    work = layers(1)
    found = steps(work, offload(["gpu", "disk"], ["accelerator"] * 2, pipeline="memory"), 1)
    assert found == pytest.approx([0.1 + 6 + 0.05 + 0.3])


def test_a_block_on_both_devices_takes_as_long_as_the_slower() -> None:
    work = layers(1, ffn_parts=3)
    found = steps(work, offload(["gpu", "gpu", "gpu", "ram"]), 1)
    assert found == pytest.approx([0.1 + max(0.2, 1.0)])


def test_keys_and_values_go_up_before_attention_and_then_down() -> None:
    """Ten tokens of 20 bytes: nine are loaded in 0.9 s, one is saved in 0.2 s, and reading all takes 0.2 s."""
    work = layers(1, kv_token=20)
    size = StepSize(1, 1, 10)
    chosen = offload(["gpu"] * 2, pipeline="memory")
    assert steps(work, chosen, 2, size=size) == pytest.approx([0.9 + 0.1 + 0.2 + 0.2 + 0.3] * 2)
    beside = steps(work, replace(chosen, pipeline="performance"), 2, size=size)
    assert beside == pytest.approx([0.9 + 0.3 + 0.3, 0.8 + 0.3 + 0.3])  # 0.1 s of the second load beside the FFN
    assert steps(work, replace(chosen, kv="gpu"), 2, size=size) == pytest.approx([0.6] * 2)


def test_a_layer_with_a_window_reads_no_more_than_that() -> None:
    work = layers(1, kv_token=20)
    narrow = replace(work, segments=(replace(work.segments[0], window=4), work.segments[1]))
    chosen, size = offload(["ram"] * 2), StepSize(1, 1, 10)
    assert steps(work, chosen, 1, size=size) == pytest.approx([1 + 10 * 20 / 100 + 3])
    assert steps(narrow, chosen, 1, size=size) == pytest.approx([1 + 4 * 20 / 100 + 3])


def test_keys_and_values_are_not_loaded_before_they_are_saved() -> None:
    """Saving takes so long that the next step's attention waits exactly for it."""
    assert MACHINE.accelerator is not None
    link = replace(MACHINE.accelerator.link, down=1.0)
    machine = replace(MACHINE, accelerator=replace(MACHINE.accelerator, link=link))
    work = layers(1, kv_token=20)
    first, second = steps(work, offload(["gpu"] * 2), 2, machine, StepSize(1, 1, 10))
    assert first == pytest.approx(0.9 + 0.3 + 0.3)
    assert second == pytest.approx(20 - 0.3 + 0.9 + 0.3 + 0.3)


def test_what_passes_through_the_hosts_memory_shares_it() -> None:
    """Streaming from RAM also reads the host's memory for the link. Streaming from disk also writes to it."""
    shared = replace(MACHINE, bus=100.0)
    assert steps(layers(3), offload(["ram"] * 6), 1, shared) == pytest.approx([12])
    half: list[Place] = ["accelerator", "host"] * 3
    assert sum(steps(layers(3), offload(["ram"] * 6, half), 2)) < 20
    assert steps(layers(3), offload(["ram"] * 6, half), 2, shared) == pytest.approx([12, 12])
    slow = replace(shared, bus=10.0)
    assert steps(layers(3), offload(["disk"] * 6), 1, slow) == pytest.approx([2 * 1200 / 10])


A_TIER: st.SearchStrategy[Tier] = st.sampled_from(TIERS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[NodeWork, Offload, dict[str, list[float]]]:
    """Draw a small model, a configuration of it, and the seconds of its tasks."""
    work = layers(draw(st.integers(1, 4)), draw(st.sampled_from([0, 8])), draw(st.sampled_from([1, 2, 3])))
    count = len(work.segments)
    residence: list[Tier] = draw(st.lists(A_TIER, min_size=count, max_size=count))
    wanted = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    places: list[Place] = [
        "accelerator" if tier == "gpu" or there else "host" for tier, there in zip(residence, wanted, strict=True)
    ]
    pipeline = draw(st.sampled_from(["performance", "memory"]))
    names = ("read", "up", "last_up", "kv_up", "kv_down", "accelerator", "host")
    a_time = st.integers(0, 9).map(float)
    seconds = {name: draw(st.lists(a_time, min_size=count, max_size=count)) for name in names}
    seconds["last_up"] = [min(pair) for pair in zip(seconds["last_up"], seconds["up"], strict=True)]
    seconds["first_read"] = [value / 2 for value in seconds["read"]]
    return work, offload(residence, places, draw(st.sampled_from(["gpu", "ram"])), pipeline), seconds


def tasks_of(seconds: dict[str, list[float]]) -> Tasks:
    columns = {name: np.array(values).reshape(-1, 1) for name, values in seconds.items()}
    nothing = dict.fromkeys(("weights_bus", "host_bus", "host_kv_bus", "kv_bus"), np.zeros((len(seconds["host"]), 1)))
    arrays: dict[str, Any] = columns | nothing
    return Tasks(**arrays, head=0.0, head_read=0.0, exchange=0.0)


@given(cases())
def test_it_is_the_plain_timeline(case: tuple[NodeWork, Offload, dict[str, list[float]]]) -> None:
    work, chosen, seconds = case
    candidates = Candidates.of(work, [chosen], "decode")
    found = simulate_steps(tasks_of(seconds), candidates, work.blocks, chosen.pipeline, 3).steps[:, 0]
    assert np.cumsum(found) == pytest.approx(plain_ends(work, chosen, seconds, 3))


@given(cases())
def test_no_step_is_shorter_than_the_closed_form(case: tuple[NodeWork, Offload, dict[str, list[float]]]) -> None:
    work, chosen, seconds = case
    candidates, tasks = Candidates.of(work, [chosen], "decode"), tasks_of(seconds)
    found = simulate_steps(tasks, candidates, work.blocks, chosen.pipeline, 4).steps[:, 0]
    least = bound(tasks, candidates, work.blocks, chosen.pipeline)[0]
    assert found[0] >= least - 1e-9
    assert found.mean() >= least - 1e-9


@given(cases(), st.sampled_from(["read", "up", "kv_up", "kv_down", "accelerator", "host"]), st.data())
def test_nothing_ends_sooner_when_a_task_takes_longer(
    case: tuple[NodeWork, Offload, dict[str, list[float]]], name: str, data: st.DataObject
) -> None:
    work, chosen, seconds = case
    candidates = Candidates.of(work, [chosen], "decode")
    before = simulate_steps(tasks_of(seconds), candidates, work.blocks, chosen.pipeline, 3).steps.sum()
    seconds[name][data.draw(st.integers(0, len(work.segments) - 1))] += 3
    after = simulate_steps(tasks_of(seconds), candidates, work.blocks, chosen.pipeline, 3).steps.sum()
    assert after >= before - 1e-9


@given(st.lists(cases(), min_size=2, max_size=2))
def test_candidates_do_not_see_one_another(pair: list[tuple[NodeWork, Offload, dict[str, list[float]]]]) -> None:
    (work, chosen, seconds), (_, other, _) = pair
    if len(other.residence) != len(chosen.residence):
        other = offload(["gpu"] * len(chosen.residence))
    both = [chosen, replace(other, pipeline=chosen.pipeline)]
    together = simulate_steps(tasks_of(seconds), Candidates.of(work, both, "decode"), work.blocks, chosen.pipeline, 3)
    for index, one in enumerate(both):
        alone = simulate_steps(tasks_of(seconds), Candidates.of(work, [one], "decode"), work.blocks, one.pipeline, 3)
        assert together.steps[:, index] == pytest.approx(alone.steps[:, 0])
