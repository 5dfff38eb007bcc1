"""Threads that work for microseconds at a time and must not wait for those that compute.

A thread that reads ahead needs a core for a moment when a read is done, and the disk idles until it gets one; a ZeroMQ
I/O thread likewise when a message is there, and another node waits.
"""

import ctypes
import os
import struct
from pathlib import Path
from threading import get_native_id

_SYSCALLS = {"x86_64": 314, "aarch64": 274}  # sched_setattr
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_SLICE_NS = 100_000  # the shortest there is
_TASKS = Path("/proc/self/task")


def wake_promptly(thread: int | None = None) -> bool:
    """Have a thread (the caller) run soon after it wakes, also where others keep all cores busy.

    Returns whether the kernel took it; before 6.12 it does, and pays no heed. Threads of another policy are left alone.

    Linux 6.12 and later take `sched_runtime` of an ordinary thread as the slice of time that it asks for, and let who
    asks for little run first (kernel documentation of EEVDF). That needs no privilege.

    Args:
        thread: its native id.
    """
    number = _SYSCALLS.get(os.uname().machine) if _TASKS.exists() else None
    if number is None:
        return False
    thread = get_native_id() if thread is None else thread
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:  # it has ended
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, thread, attributes, 0) == 0)


def threads() -> set[int]:
    """Native ids of this process's threads, those of libraries included; none where the system does not tell."""
    return {int(task.name) for task in _TASKS.iterdir()} if _TASKS.exists() else set()
