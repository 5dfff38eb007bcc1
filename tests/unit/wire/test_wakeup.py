"""Threads that get a core as soon as they wake."""

import ctypes
import os
import platform
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.slots.wakeup import wake_soon

GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_ns() -> int:
    """Return the time slice of this thread in ns, which Linux 6.12 and later tell; 0 on others."""
    attributes = ctypes.create_string_buffer(48)
    failed = ctypes.CDLL(None).syscall(ctypes.c_long(GETATTR[platform.machine()]), 0, attributes, 48, 0)
    return 0 if failed else struct.unpack_from("=Q", attributes, 24)[0]


def nicely() -> tuple[int, int, int]:
    """Return slices before and after, and the niceness after, for a thread that was made nice."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
    before = slice_ns()
    wake_soon()
    return before, slice_ns(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(platform.machine() not in GETATTR, reason="the number of the system call is not known here")
def test_asks_for_the_shortest_slice_and_stays_as_nice() -> None:
    with ThreadPoolExecutor(1) as pool:
        before, after, nice = pool.submit(nicely).result()
    if not before:
        pytest.skip("this kernel tells no slices")
    assert after == 100_000 < before
    assert nice == 7


def test_does_nothing_where_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an unknown system, the number may mean another system call, which would be worse than waking late."""
    asked = list[object]()
    monkeypatch.setattr(ctypes, "CDLL", asked.append)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    wake_soon()
    assert not asked
