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
_SETATTR = {"x86_64": 314, "aarch64": 274}  # system call numbers: the C library has no function for it


def wake_soon() -> None:
    """Let the calling thread take a core as soon as it wakes up. For threads that mostly wait and start transfers.

    Linux 6.12 and later let a thread that asks for short slices go before one with longer slices, because its deadline
    is nearer (the EEVDF scheduler). The thread gets no larger part of the core, and no privilege is needed. On other
    systems this does nothing. See sched(7).
    """
    number = _SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.maxsize < 1 << 32:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    request = _ATTR.pack(_ATTR.size, 0, _KEEP_POLICY, nice, 0, _SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, request, 0)  # if the kernel refuses, nothing changes
