"""libzmq's I/O thread: on the core of the sending thread while sums are short, free to run anywhere otherwise."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster.collective_helpers import House

if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
    pytest.skip("needs Linux and two CPUs", allow_module_level=True)


def io_threads() -> set[int]:
    """Return the I/O threads of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            if "ZMQbg/IO" in (task / "comm").read_text():
                found.add(int(task.name))
    return found


def allowed(others: set[int]) -> set[frozenset[int]]:
    """Return the sets of CPUs on which this process's I/O threads may run, without the threads `others`."""
    threads = io_threads() - others
    assert threads
    return {frozenset(os.sched_getaffinity(thread)) for thread in threads}


def test_it_follows_short_sums_only() -> None:
    everywhere, seen, others = {frozenset(os.sched_getaffinity(0))}, [], io_threads()
    with House(2) as house, ThreadPoolExecutor(1) as pool:
        worker = pool.submit(house.join, "star", 1).result()
        master = house.join("star", 0)
        for count in (64, 1 << 15, 64):
            values = np.ones((1, count), np.float32)
            theirs = pool.submit(worker.allreduce, values)
            master.allreduce(values)
            theirs.result()
            seen.append(allowed(others))
        pool.submit(worker.close).result()
        master.close()
        closed = allowed(others)
    short, long, again = seen
    for kept in (short, again):
        (cpus,) = kept
        assert len(cpus) == 1
    assert long == closed == everywhere


def test_it_follows_for_each_group_of_a_process() -> None:
    """An older group that still keeps its I/O thread on a core does not affect the newer group's."""
    everywhere, one, others = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}, io_threads()
    values = np.ones((1, 64), np.float32)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            house = stack.enter_context(House(2))
            worker, master = pool.submit(house.join, "star", 1).result(), house.join("star", 0)
            stack.callback(master.close)
            stack.callback(worker.close)
            pool.submit(os.sched_setaffinity, 0, one).result()
            os.sched_setaffinity(0, one)
            try:
                theirs = pool.submit(worker.allreduce, values)
                master.allreduce(values)
                theirs.result()
                assert allowed(others) == {frozenset(one)}
            finally:
                os.sched_setaffinity(0, everywhere)  # threads that are made later have it of this one
                pool.submit(os.sched_setaffinity, 0, everywhere).result()
