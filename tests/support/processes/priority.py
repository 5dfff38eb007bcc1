"""A process that takes most of one core from others, and a thread that no other load disturbs.

Real-time priorities decide: a thread of the test runs above everything normal on the machine, so that other load
changes nothing, and the process runs above that thread for three quarters of the time.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OWN, _ABOVE = 1, 2  # priorities of SCHED_FIFO
BUSY, IDLE = 1.5e-3, 5e-4  # seconds by turns
_LOOP = f"""
import time
print("on", flush=True)
while True:
    until = time.perf_counter() + {BUSY}
    while time.perf_counter() < until:
        pass
    time.sleep({IDLE})
"""


def may_prioritise() -> bool:
    """Return True if this user may set real-time priorities."""
    try:
        with undisturbed():
            return True
    except (OSError, AttributeError):  # not allowed; no such priorities on this system
        return False


@contextmanager
def undisturbed() -> Iterator[int]:
    """Bind the calling thread to one core, with priority over normal load; yield the core's number."""
    cores, policy, given = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    core = max(cores)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_OWN))
    try:
        os.sched_setaffinity(0, {core})
        yield core
    finally:
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, policy, given)


@contextmanager
def taken(core: int) -> Iterator[None]:
    """Run another process that takes three quarters of `core` during the block."""
    process = subprocess.Popen([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(process.pid, {core})
        os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(_ABOVE))
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        yield
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
