"""The text of `--device emu:...`: every machine can be written, every preset read, and each error names its cause."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tpi.devices.choose import open_device
from tpi.devices.emulated.device import open_emulated
from tpi.devices.emulated.machine import EmulatedMachine, parse_emulated
from tpi.devices.emulated.presets import PRESETS
from tpi.errors import DeviceFullError, UsageError

RATES = st.floats(1e-3, 1e18)
SECONDS = st.floats(0, 1e3)
SIZES = st.integers(1, 1 << 50)
MACHINES = st.builds(
    EmulatedMachine,
    capacity=SIZES,
    **dict.fromkeys(("up", "down", "memory", "flops", "host_memory", "host_flops", "disk"), RATES),
    ram=SIZES,
    latency=SECONDS,
    launch=SECONDS,
    stretch=st.none() | st.floats(1, 1e6),
    name=st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,31}", fullmatch=True),
)


@given(MACHINES)
def test_a_machine_is_read_as_it_was_written(machine: EmulatedMachine) -> None:
    assert parse_emulated(machine.text()) == machine


def test_what_is_said_counts_whatever_its_order() -> None:
    machine = parse_emulated("6GiB, host=0.25,link=2GB/s,memory=100GB/s,down=500MB/s,flops=8T,latency=20us,ram=1.5GiB")
    assert machine == EmulatedMachine(
        6 << 30, up=2e9, down=5e8, memory=1e11, flops=8e12, host_memory=2.5e10, host_flops=2e12, latency=2e-5,
        ram=3 << 29,
    )  # fmt: skip
    assert parse_emulated("6GiB,host=0.5,host_flops=1GFLOPS").host_flops == 1e9
    assert parse_emulated("1000B,link=1GiB/s,stretch=8,name=left") == EmulatedMachine(
        1000, up=1 << 30, down=1 << 30, stretch=8, name="left"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_machines_that_can_be_changed(preset: str) -> None:
    machine = parse_emulated(preset)
    assert machine.disk < machine.up < machine.host_memory < machine.memory
    assert machine.host_flops < machine.flops
    assert machine.capacity < machine.ram
    assert parse_emulated(f"{preset},link=2GB/s").up == 2e9


def test_what_is_not_said_is_the_papers_laptop() -> None:
    assert parse_emulated("6GiB") == parse_emulated("rtx3060-laptop")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "begins with neither"),
        ("link=2GB/s", "begins with neither"),
        ("rtx5090", "rtx3060-laptop, rtx4090-desktop"),
        ("6GiB,speed=3", "speed=3"),
        ("6GiB,link", "'link'"),
        ("6GiB,", "''"),
        ("6GiB,link=2GB", "link=2GB"),
        ("6GiB,link=fast", "link=2GB/s"),
        ("6GiB,link=0GB/s", "must be positive"),
        ("6GiB,link=-1GB/s", "link=-1GB/s"),
        ("6GiB,link=nan", "link=nan"),
        ("6GiB,link=1e999B/s", "positive and finite"),
        ("6GiB,flops=1TB/s", "flops=12TFLOPS"),
        ("6GiB,latency=10", "latency=10us"),
        ("6GiB,host=much", "host=much"),
        ("6GiB,host=0", "must be positive"),
        ("6GiB,stretch=soon", "stretch=soon"),
        ("6GiB,ram=0", "ram"),
        ("6GiB,name=a b", "letters"),
        ("0", "capacity"),
        ("6 potatoes", "not a size"),
        ("6GiB,link=1GB/s,link=2GB/s", "link is given twice"),
    ],
)
def test_what_is_wrong_is_named(text: str, names: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_device(f"emu:{text}")
    assert names in str(caught.value)


def test_a_limit_is_kept_and_is_no_more_than_the_capacity() -> None:
    with pytest.raises(UsageError, match=r"8192 bytes .* 8193;"):
        open_emulated("8192B", 8193)
    device = open_emulated("8192B", 4096)
    device.memory.allocate(4096)
    with pytest.raises(DeviceFullError, match="emu may use 4096 bytes"):
        device.memory.allocate(1)
    device.close()


def test_the_page_has_every_preset_and_every_word() -> None:
    page = (ROOT / "docs/emulation.md").read_text()
    table = {row.split("`")[1]: row for row in page.split("## Presets")[1].splitlines() if row.startswith("| `")}
    assert table.keys() == PRESETS.keys()
    for name, row in table.items():
        figures = {word.partition("=")[2] for word in PRESETS[name].split(",")[1:]}
        assert not {figure for figure in figures if figure not in row.replace(" ", "")}
    words = {word for row in page.splitlines() if row.startswith("| `") for word in row.split("|")[1].split("`")[1::2]}
    assert words >= {field.name for field in fields(EmulatedMachine)} - {"capacity"} | {"link", "host"}
