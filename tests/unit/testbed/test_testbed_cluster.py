"""Ending a run of the testbed: a signal is noticed, whatever happens to the exception that it raises."""

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from testbed import cluster

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


class FakeBed:
    """A testbed of one device whose programs are children of this process."""

    topology = SimpleNamespace(devices=[SimpleNamespace(name="device1")])

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[Any]] = []

    def popen(self, device: str, command: list[str], env: dict[str, str]) -> "subprocess.Popen[Any]":
        """Start a program as `testbed.launch.Testbed.popen` does."""
        self.started.append(subprocess.Popen(command, env=env))
        return self.started[-1]

    def ended(self) -> bool:
        """Return False: this testbed does not end by itself."""
        return False


class Struck:
    """An object in whose destructor this process gets a signal; Python prints the exception and continues."""

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
    """The lock is in the state that an exception leaves between taking and releasing it."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process: Any = subprocess.Popen([sys.executable, "-c", f"{deaf}; print(flush=True); time.sleep(1000)"], stdout=-1)
    process.stdout.readline()
    process.stdout.close()
    monkeypatch.setattr(cluster, "_GRACE", 0.2)
    process._waitpid_lock.acquire()
    cluster._stop([process])
    process._waitpid_lock.release()
    assert process.wait(60) == -signal.SIGKILL
