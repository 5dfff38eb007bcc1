"""Homes that flags describe, and errors in them; links measured by echoes; quotas of processor time."""

from dataclasses import replace
from pathlib import Path

import pytest

from master.planning.home.dealing import HomeModel
from master.planning.home.members import described_home, home_in_file, links_of_home
from master.planning.problem import request_of
from master.planning.shapes import model_shape
from master.workers.asking import link_from
from scheduler.free import less_margin
from scheduler.model.machine import LAPTOP
from tests.support.paths import DATA
from tpi.errors import UsageError
from tpi.system.machine import usable_cores
from tpi.system.quota import allowed_cores
from tpi.topology.links import LOOPBACK, Link

GIB = 1 << 30


def test_machines_by_their_memory() -> None:
    home = described_home("16GiB, 2 x 8GiB", "1 Gbit, 2 ms")
    assert home.names == ("master", "device-1", "device-2")
    assert [machine.memory for machine in home.machines] == [less_margin(size * GIB) for size in (16, 8, 8)]
    assert all(machine.accelerator is None for machine in home.machines)
    assert home.links.between(1, 2) == Link(LOOPBACK.latency_s + 0.002, 1e9 / 8)


@pytest.mark.parametrize(
    ("devices", "link", "said"),
    [
        ("8y8GiB", "1 Gbit, 1 ms", "is not a size"),
        ("", "1 Gbit, 1 ms", "--devices '' is not understood"),
        ("0x8GiB", "1 Gbit, 1 ms", "not understood"),
        ("2x0GiB", "1 Gbit, 1 ms", "needs memory"),
        ("65x8GiB", "1 Gbit, 1 ms", "more than the 64"),
        ("2x8GiB", "1 Gbit", "--link '1 Gbit'"),
        ("2x8GiB", "fast, 1 ms", "--link 'fast, 1 ms'"),
        ("2x8GiB", "0 Mbit, 1 ms", "carries nothing"),
    ],
)
def test_words_that_mean_nothing(devices: str, link: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        described_home(devices, link)


def test_the_home_of_a_file(tmp_path: Path) -> None:
    own = replace(LAPTOP, accelerator=None)
    home = home_in_file("paper-4-laptops", own, cores=8)
    assert home.names == ("mac-pro", "mac-air", "dell1", "dell2")
    assert home.machines[1].host.read == own.host.read / 2
    assert home.machines[2].memory == less_margin(16_000_000_000)
    assert home.links.between(0, 1) == Link(LOOPBACK.latency_s + 0.012, 320e6 / 8)
    with pytest.raises(UsageError, match="neither a file nor a shipped topology"):
        home_in_file(str(tmp_path / "none.yaml"), own, cores=8)


def test_unmeasured_workers_are_as_far_as_the_farther() -> None:
    to_workers, wired = [Link(0.001, 1e8), Link(0.005, 1e6)], Link(0.0001, 1e9)
    assert links_of_home(to_workers, {}).between(0, 1) == Link(0.001, 1e8)
    assert links_of_home(to_workers, {}).between(1, 2) == Link(0.005, 1e6)
    assert links_of_home(to_workers, {(0, 1): wired}).between(1, 2) == wired
    slowed = {(0, 1): Link(0.1, 1e6)}  # measured while something was wrong
    assert links_of_home(to_workers, slowed).between(1, 2) == Link(0.005, 1e6)


def test_a_link_from_echoes() -> None:
    assert link_from(0.01, 0.03, 1000).latency_s == 0.005
    assert link_from(0.01, 0.03, 1000).bytes_per_s == pytest.approx(1e5)  # both ways in 20 ms
    assert link_from(0.0, 0.0, 1000).bytes_per_s > 0


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/box", {"box/cpu.max": "40000 100000"}, 0.4),
        ("0::/box/inner", {"box/cpu.max": "50000 100000", "box/inner/cpu.max": "max 100000"}, 0.5),
        ("3:cpu,cpuacct:/box", {"cpu/box/cpu.cfs_quota_us": "1000", "cpu/box/cpu.cfs_period_us": "10000"}, 0.1),
        ("3:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "10000"}, None),
        ("2:memory:/box", {"cpu/box/cpu.cfs_quota_us": "1000", "cpu/box/cpu.cfs_period_us": "10000"}, None),
        ("0::/box", {}, None),
    ],
)
def test_a_quota_of_the_cores(line: str, files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    (tmp_path / "own").write_text(line + "\n")
    found = allowed_cores(tmp_path / "groups", tmp_path / "own")
    assert found == (cores if cores is not None else usable_cores())


def test_sums_take_the_software_time_that_was_measured(tmp_path: Path) -> None:
    shape = model_shape(str(DATA / "llama-3.1-70b/config.json"), "q4", tmp_path, 64 * GIB, 4)
    home = described_home("8x16GiB", "1 Gbit, 1 ms")

    def sums(software: dict[int, float]) -> dict[int, float]:
        model = HomeModel(shape, replace(home, software=software), request_of(shape.config, None, None, 1, None))
        return {nodes: model.exchange(tuple(range(nodes)), 1)[0] for nodes in (1, 2, 4, 8)}

    usual, learnt = sums({}), sums({2: 1e-3})
    assert learnt[1] == usual[1] == 0.0
    assert learnt[2] - usual[2] == pytest.approx(1e-3 - 0.1e-3)
    assert learnt[8] - usual[8] == pytest.approx(9 * 1.3e-3)  # these machines take ten times as long
    assert sums({2: 1e-3, 8: 2e-3})[8] - usual[8] == pytest.approx(2e-3 - 1.3e-3)
    assert sums({2: 1e-3, 4: 0.5e-3})[8] == pytest.approx(usual[8])
