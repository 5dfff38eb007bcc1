"""The machine's memory, as the system and psutil report it."""

import errno
import os
from pathlib import Path

import psutil
import pytest

from tpi.errors import TpiError
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


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")]
)
def test_what_is_refused_for_lack_of_memory_says_what_to_do(error: Exception) -> None:
    with pytest.raises(TpiError, match="no more memory or threads; free memory, or raise"), memory.explain_exhaustion():
        raise error


@pytest.mark.parametrize("error", [RuntimeError("other"), OSError(errno.ENOENT, "gone"), TpiError("known")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory.explain_exhaustion():
        raise error
    assert raised.value is error


def test_a_limit_of_the_address_space_is_what_may_still_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 50, -1))
    left = memory.address_space()
    assert left is None or 0 < left < 1 << 50
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    assert memory.address_space() is None
