"""Limits of devices: the files written for cgroups of versions 1 and 2, and that the kernel enforces them."""

import sys
from pathlib import Path

import pytest

from testbed import cgroups
from testbed.cgroups import Hierarchies, find_hierarchies, group_directories, make_group, quota, remove_groups
from testbed.launch import Testbed
from tests.support.testbed_helpers import needs_root
from tpi.errors import TestbedError
from tpi.topology.topology import Host, HostLink, Topology

LIMITED = Host("shelf", cpu=0.2, memory=300 << 20, disk=50e6)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Return directories like a kernel's cgroup controllers."""
    for name in ("cpu", "memory", "blkio"):
        (tmp_path / name).mkdir()
    return tmp_path


def written(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}


def test_version_1_files(mounted: Path) -> None:
    version1 = {name: mounted / name for name in ("cpu", "memory", "blkio")}
    groups = make_group(Hierarchies(version1), "tpi-1", LIMITED, ["8:0"])
    assert groups == tuple(str(mounted / name / "tpi-1/shelf") for name in version1)
    assert written(Path(groups[0])) == {"cpu.cfs_period_us": "5000", "cpu.cfs_quota_us": "1000"}
    assert written(Path(groups[1]))["memory.limit_in_bytes"] == str(300 << 20)
    assert written(Path(groups[2])) == {
        "blkio.throttle.read_bps_device": "8:0 50000000",
        "blkio.throttle.write_bps_device": "8:0 50000000",
    }


def test_version_2_files(mounted: Path) -> None:
    (group,) = make_group(Hierarchies({}, mounted), "tpi-1", LIMITED, ["8:0"])
    assert written(Path(group)) == {
        "cpu.max": "1000 5000",
        "memory.max": str(300 << 20),
        "memory.swap.max": "0",
        "io.max": "8:0 rbps=50000000 wbps=50000000",
    }
    assert (mounted / "cgroup.subtree_control").read_text() == "+cpu +memory +io"
    assert (mounted / "tpi-1" / "cgroup.subtree_control").read_text() == "+cpu +memory +io"


@pytest.mark.parametrize(("version", "file", "weight"), [(1, "cpu.shares", 30 * 1024), (2, "cpu.weight", 3000)])
def test_devices_come_before_other_programs_of_the_host(mounted: Path, version: int, file: str, weight: int) -> None:
    root = mounted / "cpu" if version == 1 else mounted
    (root / "tpi-1").mkdir()
    (root / "tpi-1" / file).write_text("as the kernel has it")
    make_group(Hierarchies({"cpu": root}) if version == 1 else Hierarchies({}, root), "tpi-1", Host("free"), [])
    assert (root / "tpi-1" / file).read_text() == str(weight)


def test_a_device_without_limits_only_has_a_group() -> None:
    assert list(cgroups.limits(Host("free"), ["8:0"])) == []


def test_a_limit_that_cannot_be_set_is_an_error(mounted: Path) -> None:
    with pytest.raises(TestbedError, match="shelf limits blkio"):
        make_group(Hierarchies({name: mounted / name for name in ("cpu", "memory")}), "tpi-1", LIMITED, ["8:0"])


def test_the_mount_table_tells_the_version(mounted: Path) -> None:
    lines = f"cgroup {mounted}/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup2 {mounted} cgroup2 rw 0 0\n"
    assert find_hierarchies(lines).controllers() == {"cpu": "v1"}
    (mounted / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert find_hierarchies(lines).controllers() == {"cpu": "v2", "memory": "v2", "blkio": "v2"}


def test_quota_never_falls_under_what_the_kernel_takes() -> None:
    assert quota(0.2) == (1000, 5000)
    assert quota(2.5) == (12500, 5000)
    assert quota(0.05) == (1000, 20000)


def test_groups_are_removed_children_first(mounted: Path) -> None:
    version1 = {name: mounted / name for name in ("cpu", "memory")}
    for device in ("a", "b"):
        make_group(Hierarchies(version1), "tpi-1", Host(device), [])
    left = group_directories(Hierarchies(version1), "tpi-1", ["a", "b", "never-made"])
    assert remove_groups(left) == []
    assert not list(mounted.glob("*/*"))


SPIN = """
import time
started, cpu = time.perf_counter(), time.process_time()
while time.perf_counter() - started < 1.0: pass
print(time.process_time() - cpu)
"""
HOARD = "b = bytearray(200 << 20); print(len(b))"


@needs_root
@pytest.mark.alone
def test_the_kernel_keeps_devices_to_their_limits() -> None:
    devices = (Host("slow", cpu=0.2), Host("small", memory=100 << 20))
    wanted = {"cpu", "memory"}
    if not wanted <= set(find_hierarchies().controllers()):
        pytest.skip("no cgroup controllers for cpu and memory here")
    with Testbed.start(Topology("limits", devices, (HostLink(("slow", "small")),))) as bed:
        spin = bed.popen("slow", [sys.executable, "-c", SPIN], stdout=-1, text=True)
        hoard = bed.popen("small", [sys.executable, "-c", HOARD], stdout=-1, text=True)
        assert 0.01 < float(spin.communicate(timeout=60)[0]) < 0.25  # less where the host is busy
        assert hoard.communicate(timeout=60)[0] == ""
        assert hoard.returncode != 0
