"""Earlier wake-ups for threads that transfer data while computing threads keep all cores busy."""

import ctypes
import os
import platform
import struct
import sys
import threading

_SLICE_NS = 100_000  # the shortest slice that Linux grants
_KEEP_POLICY = 0x08
_ATTR = struct.Struct("=IIQiIQQQ")  # sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_SETATTR = {"x86_64": 314, "aarch64": 274}  # system call numbers of sched_setattr, which the C library does not have


def wake_soon() -> None:
    """Let the calling thread, which mostly waits and starts transfers, get a core as soon as it wakes up.

    The thread asks for short time slices. Linux 6.12 and later run it before threads with longer slices, because its
    deadline is nearer (the EEVDF scheduler). It gets no larger share of the core, and needs no privilege. On other
    systems this does nothing. sched(7) describes the scheduler.
    """
    number = _SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.maxsize < 1 << 32:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    request = _ATTR.pack(_ATTR.size, 0, _KEEP_POLICY, nice, 0, _SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, request, 0)  # if the kernel refuses, nothing changes
