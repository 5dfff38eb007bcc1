"""Ending a testbed's run: a signal is heard whatever becomes of the exception that it raises."""

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from testbed import cluster

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


class FakeBed:
    """A testbed of one device, on which programs are children of this process."""

    topology = SimpleNamespace(devices=[SimpleNamespace(name="device1")])

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[Any]] = []

    def popen(self, device: str, command: list[str], env: dict[str, str]) -> "subprocess.Popen[Any]":
        """See `testbed.launch.Testbed.popen`."""
        self.started.append(subprocess.Popen(command, env=env))
        return self.started[-1]

    def ended(self) -> bool:
        """See `testbed.launch.Testbed.ended`."""
        return False


class Struck:
    """An object in whose destructor this process gets a signal: Python prints what that raises, and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_dropped_ends_the_run() -> None:
    bed: Any = FakeBed()
    with cluster.stop_on_signals() as ending:
        struck = Struck()
        del struck
        with pytest.raises(SystemExit) as left:
            cluster.run(bed, SLEEP, "", ending)
    assert left.value.code == 128 + signal.SIGTERM
    assert [process.returncode for process in bed.started] == [-signal.SIGTERM]


def test_a_process_that_ignores_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is as an exception leaves it that strikes between taking it and giving it back."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process: Any = subprocess.Popen([sys.executable, "-c", f"{deaf}; print(flush=True); time.sleep(1000)"], stdout=-1)
    process.stdout.readline()
    process.stdout.close()
    monkeypatch.setattr(cluster, "_GRACE", 0.2)
    process._waitpid_lock.acquire()
    cluster._stop([process])
    process._waitpid_lock.release()
    assert process.wait(60) == -signal.SIGKILL
