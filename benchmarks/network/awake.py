"""Processors that never halt while a network of devices is emulated on them.

A guest's processor that halts is another guest's until the host gives it back, which on a busy host takes milliseconds:
as much as the links that are emulated, at every message. So each processor gets a process that keeps it busy and yields
to whatever else wants it at once (SCHED_IDLE), as `idle=poll` would do for a kernel of one's own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n for _ in range(10**6): pass"


@contextmanager
def awake() -> Iterator[None]:
    """Keep this process's processors from halting; does nothing where the system has no idle scheduling class."""
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
