"""What the machine says of its memory, beside what psutil makes of it."""

import os
from pathlib import Path

import psutil
import pytest

from tpi.system import memory
from tpi.system.machine import disk_free


@pytest.mark.parametrize("linux", [True, False])
def test_figures_are_those_of_psutil(linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if linux and not Path("/proc/meminfo").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(memory, "_LINUX", linux)
    machine = psutil.virtual_memory()
    assert memory.total_memory() == machine.total
    assert 0 < memory.available_memory() <= machine.total
    assert memory.available_memory() == pytest.approx(machine.available, rel=0.5)
    assert memory.resident_memory() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_what_is_free_on_a_disk_is_what_users_may_take(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert 0 < disk_free(tmp_path) <= found.f_bfree * found.f_frsize
