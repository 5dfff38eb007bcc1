"""Descriptions of machines: given values, defaults of a laptop, and refused descriptions."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.planning.node import NodeFlags, planned_node
from scheduler.model.machine import EXAMPLE, GIB, LAPTOP, emulated_node, laptop_gpu, parse_machine
from tpi.devices.emulated.machine import parse_emulated
from tpi.errors import PlanError, UsageError


def test_what_is_said_and_what_is_a_laptops() -> None:
    found = parse_machine(EXAMPLE)
    assert found.accelerator is not None
    assert (found.accelerator.memory, found.memory, found.disk.read) == (8 * GIB, 16 * GIB, 2e9)
    assert found.accelerator.rates == laptop_gpu().rates
    assert found.accelerator.link == laptop_gpu().link
    assert found.host == LAPTOP.host
    assert found.bus == LAPTOP.host.read  # what the host reads and copies shares its memory


def test_every_rate_can_be_said() -> None:
    words = "24GiB GPU, 1TB/s GPU, 165TFLOP/s gpu, 64 GiB RAM, 67GB/s ram, 1TFLOP/s CPU, 20GB/s link, 500MB/s disk"
    found = parse_machine(words)
    assert found.accelerator is not None
    rates, link = found.accelerator.rates, found.accelerator.link
    assert (rates.read, rates.operations, link.up, link.down) == (1e12, 165e12, 20e9, 20e9)
    assert (found.host.read, found.host.operations, found.disk.read) == (67e9, 1e12, 5e8)


def test_without_a_gpu_there_is_none() -> None:
    assert parse_machine("8GiB RAM, 1GB/s disk").accelerator is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "'' does not describe a part of a machine"),
        ("8GiB disk", "'8GiB disk' does not describe a part of a machine"),
        ("8GiB", "'8GiB' does not describe a part of a machine"),
        ("2GB/s CPU", "'2GB/s CPU' does not describe a part of a machine"),
        ("1TFLOP/s link", "does not describe a part of a machine"),
        ("8GiB GPU, 9GiB GPU", "'9GiB GPU' is given twice"),
        ("8GiB GPU,", "'' does not describe a part of a machine"),
        ("0GiB RAM", "'0GiB RAM' is zero"),
        ("1..5GiB RAM", "is not a size"),
        ("9999999TB RAM", "too large"),
    ],
)
def test_what_means_nothing_is_named(words: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace("..", r"\.\.")):
        parse_machine(words)


@given(st.text(max_size=40))
def test_any_text_is_a_machine_or_refused(words: str) -> None:
    with suppress(UsageError):
        assert parse_machine(words).memory > 0


def test_an_emulation_is_a_node_whose_lanes_share_nothing() -> None:
    found = emulated_node(
        parse_emulated("6GiB,up=2GB/s,down=1GB/s,host_memory=10GB/s,disk=1GB/s,launch=1ms,latency=2ms")
    )
    assert found.accelerator is not None
    link = found.accelerator.link
    assert (link.up, link.down, link.latency, found.accelerator.rates.start, found.host.start) == (
        2e9,
        1e9,
        2e-3,
        1e-3,
        1e-3,
    )
    assert (found.host.read, found.disk.read, found.bus) == (10e9, 1e9, float("inf"))


@pytest.mark.parametrize(
    "machine",
    [NodeFlags("16GiB RAM"), NodeFlags("8GiB GPU, 16GiB RAM"), NodeFlags(devices=("emu:1GiB,ram=16GiB,stretch=1",))],
)
def test_no_more_memory_is_planned_than_a_described_machine_has(machine: NodeFlags, tmp_path: Path) -> None:
    asked = replace(machine, memory=16 << 30)
    assert planned_node(asked, tmp_path, ()).machine.memory == 16 << 30
    with pytest.raises(PlanError, match="--memory 20480MiB is beyond what this machine has; give at most 16384MiB"):
        planned_node(replace(asked, memory=20 << 30), tmp_path, ())
