"""Threads that ask to run soon after they wake."""

from pathlib import Path
from threading import Thread, get_native_id

import pytest
import zmq

from tpi.sockets import CONTROL, Net
from tpi.wake import threads, wake_promptly

ASKED_FOR = 100_000  # nanoseconds


def slice_ns(thread: int) -> int | None:
    """What the kernel says of a thread's slice, if anything."""
    told = Path(f"/proc/self/task/{thread}/sched")
    lines = told.read_text().splitlines() if told.exists() else []
    return next((int(line.rpartition(":")[2]) for line in lines if line.startswith("se.slice")), None)


def test_a_thread_gets_the_slice_that_it_asks_for() -> None:
    seen: list[int | None] = []
    thread = Thread(target=lambda: seen.extend([wake_promptly(), slice_ns(get_native_id())]))
    thread.start()
    thread.join()
    if not seen[0] or seen[1] is None:
        pytest.skip("this kernel has no slices, or does not tell")
    assert seen[1] == ASKED_FOR


def test_io_threads_of_zeromq_ask_for_it() -> None:
    before = threads()
    net = Net()
    try:
        net.open(zmq.ROUTER, CONTROL)
        slices = [slice_ns(thread) for thread in threads() - before]
    finally:
        net.close()
    if not slices or None in slices:
        pytest.skip("this kernel does not tell the slices of threads")
    assert ASKED_FOR in slices
