"""Processors that never halt while they emulate a network of devices.

If a virtual processor halts, the host can give its core to another guest. On a busy host it takes milliseconds to get
the core back, as long as the emulated links take for a message. So each processor runs a process that keeps it busy and
yields to all other work at once (SCHED_IDLE). On a physical machine the kernel parameter `idle=poll` does the same.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n for _ in range(10**6): pass"


@contextmanager
def awake() -> Iterator[None]:
    """Keep this process's processors from halting. Without an idle scheduling class in the system, do nothing."""
    with ExitStack() as spinning:
        if sys.platform == "linux":
            for processor in os.sched_getaffinity(0):
                spinning.enter_context(_spin(processor))
        yield


@contextmanager
def _spin(processor: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())]) as process:
        try:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setaffinity(process.pid, {processor})
            yield
        finally:
            process.kill()
