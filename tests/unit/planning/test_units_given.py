"""Amounts in options: a number without a unit is refused with a list of units, and so are infinity and NaN."""

from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from master.api.command import serve
from master.commands import run
from master.planning.command import plan
from testbed.commands import testbed as bed
from tpi.config import parse_size
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.errors import TpiError, UsageError
from tpi.topology.schema import parse_topology
from tpi.topology.units import parse_disk, parse_rate, parse_time
from worker.commands import worker

RUN = ("-m", "x", "-p", "x")
HOME = ("-m", "x", "--devices")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4 gb", 4e9), ("4G", 4e9), ("4Gi", 4 << 30), ("4gib", 4 << 30), ("1.5KiB", 1536), (" 7B ", 7), ("0", 0)],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["4", "4096", "0.5", "4.0 "])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    number = text.strip()
    with pytest.raises(UsageError, match=f"--memory '{text}' has no unit; do you mean {number}GiB or {number}MiB"):
        parse_size(text, "--memory")


@pytest.mark.parametrize(
    "text", ["", "-4GiB", "nan", "inf", "1e3GiB", "4i", "4iB", "GiB", "4 G B", "4GiBs", "4GiB\n4", "٤GiB"]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_rate, "300", "no unit; do you mean 300 Mbit or 300 Gbit"),
        (parse_time, "4", "no unit; do you mean 4 ms or 4 s"),
        (parse_disk, "80", "no unit; do you mean 80 MB/s or 80 GB/s"),
        (parse_rate, "9" * 400 + " Gbit", "too large"),
        (parse_time, "9" * 400 + " s", "too large"),
        (parse_time, "-1 ms", "is not a time"),
        (parse_rate, "nan Mbit", "is not a rate"),
        (parse_disk, "inf MB/s", "is not a disk speed"),
    ],
)
def test_what_is_not_a_rate_or_a_time(parse: Callable[[str], float], text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        (run, (*RUN, "--memory", "4"), "--memory '4' has no unit"),
        (run, (*RUN, "--gpu-memory", "4"), "--gpu-memory '4' has no unit"),
        (run, (*RUN, "--cache-limit", "4"), "--cache-limit (or TPI_CACHE_LIMIT) '4' has no unit"),
        (run, (*RUN, "--patience", "nan"), "nan is not a finite number"),
        (run, (*RUN, "--patience", "inf"), "inf is not a finite number"),
        (serve, ("-m", "x", "--timeout", "nan"), "nan is not a finite number"),
        (serve, ("-m", "x", "--timeout", "1e999"), "1e999 is not a finite number"),
        (worker, ("--listen", "127.0.0.1:0", "--memory", "4"), "--memory '4' has no unit"),
        (worker, ("--listen", "127.0.0.1:0", "--cache-limit", "-1GiB"), "'-1GiB' is not a size"),
        (plan, ("-m", "x", "--memory", "4"), "--memory '4' has no unit"),
        (plan, (*HOME, "8x8"), "--devices '8' has no unit"),
        (plan, (*HOME, "8x8GiB", "--link", "1 Gbit, 4"), "' 4' has no unit; do you mean 4 ms"),
        (plan, (*HOME, "8x8GiB", "--link", "100"), "'100' is not a rate and a latency; write for example"),
        (plan, (*HOME, "8x8GiB", "--link", "1, 4 ms"), "'1' has no unit; do you mean 1 Mbit"),
        (plan, ("-m", "x", "--machine", "8 GPU"), "'8 GPU' does not describe a part of a machine"),
        (bed, ("fault", "slow", "a", "--latency", "50"), "'50' has no unit; do you mean 50 ms"),
    ],
)  # fmt: skip
def test_options_refuse_what_has_no_unit_or_is_not_finite(
    command: click.Command, flags: tuple[str, ...], said: str
) -> None:
    done = CliRunner().invoke(command, flags)
    assert isinstance(done.exception, TpiError | SystemExit)
    assert said in done.output + str(done.exception)


def test_the_cache_limit_variable_is_refused_like_the_option() -> None:
    done = CliRunner(env={"TPI_CACHE_LIMIT": "20"}).invoke(run, RUN)
    assert "TPI_CACHE_LIMIT) '20' has no unit" in str(done.exception)


def test_a_number_without_a_unit_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"line 2: .*'memory': '8' has no unit; do you mean 8GiB"):
        parse_topology("devices:\n  a: {memory: 8}\n", "home.yaml", "home")


def test_sizes_that_are_handed_on_to_processes_have_units() -> None:
    arguments = DeviceOptions(("emu:1GiB",), (4096,), OffloadOptions()).arguments
    assert parse_size(arguments[arguments.index("--gpu-memory") + 1]) == 4096
    machine = parse_emulated("6GiB,ram=1GiB")
    assert parse_emulated(machine.text()) == machine
