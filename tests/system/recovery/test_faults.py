"""Faults that stop no process: a computation that hangs, clocks that step, and the same faults with commands."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from master.deployment import deploy
from master.options import RunOptions
from master.session import Session
from master.workers.asking import ask
from master.workers.remote import RemoteWorker
from tests.support.commands import TPI, clean
from tests.support.house import Laptop, house, timed_answer
from tests.support.models import TinyModel
from tpi.errors import NodeError
from tpi.net.messages import NodeOptions
from tpi.net.sockets import Net

PROMPT, LENGTH = [5, 6, 7, 8], 30
HOUR_S = 3600.0
STEPS = {
    5: (HOUR_S, 0.0),
    10: (HOUR_S, HOUR_S),
    15: (-HOUR_S, HOUR_S),
    20: (0.0, -HOUR_S),
}  # the master's, the worker's


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> str:
    return str(tiny_model("llama").directory)


def stop_computing(laptop: Laptop) -> None:
    """Make the worker's computation hang for good at the next step, while its I/O thread still answers."""
    (laptop.cache / "hang").touch()


def test_compute_hung_io_thread_alive(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lack of progress shows it, not the heartbeats, which arrive until the worker is left out."""
    monkeypatch.setattr(deploy, "NodeOptions", partial(NodeOptions, timeout_s=2.0))
    with house(tmp_path, 2) as laptops:
        hanging = laptops[1]
        hanging.stop()
        hanging.command = (sys.executable, "-m", "tests.support.processes.hanging_worker")
        hanging.start()
        addresses = tuple(one.address for one in laptops)
        with Session(RunOptions(model, workers=addresses, cache=tmp_path / "m")) as session:
            wanted = timed_answer(session, PROMPT, LENGTH).tokens
            cluster, part, seen = session._cluster, session._cluster.part, list[tuple[str, float]]()

            def noted(error: NodeError) -> list[RemoteWorker]:
                beats = next(one.heartbeats for one in cluster.workers if one.name == "b")
                seen.append((beats.phase, beats.seen - beats.advanced))
                return part(error)

            monkeypatch.setattr(cluster, "part", noted)
            spoken = timed_answer(
                session, PROMPT, LENGTH, lambda count: stop_computing(hanging) if count == 9 else None
            )
            assert spoken.tokens == wanted
            assert "b" not in session.names[:3]
            phase, stuck = seen[0]
            assert phase == "compute"
            assert stuck > 1.0  # seconds in which it was heard


def test_clock_step_of_an_hour(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens, because no wait and no lease uses the time of day of the master or of a worker."""
    real, steps = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + steps[0])
    with house(tmp_path, 1) as laptops, closing(Net()) as net:
        laptops[0].stop()
        laptops[0].command = (sys.executable, "-m", "tests.support.processes.stepping_worker")
        laptops[0].start()

        def apart() -> float:
            """Return the seconds that the worker's clock is ahead of this machine's."""
            (asked,) = ask(net, [laptops[0].address])
            assert asked.condition
            return asked.condition.clock - real()

        options = RunOptions(model, workers=(laptops[0].address,), cache=tmp_path / "m")
        with Session(options) as session:
            wanted = timed_answer(session, PROMPT, LENGTH).tokens

            def step(count: int) -> None:
                if count in STEPS:
                    steps[0], there = STEPS[count]
                    (laptops[0].cache / "step").write_text(str(there))
                    assert abs(apart() - there) < HOUR_S / 2

            assert timed_answer(session, PROMPT, LENGTH, step).tokens == wanted
            assert session.names == ("master", "a")


@pytest.mark.bare
def test_tpi_run_goes_on_after_a_lost_worker(tmp_path: Path, model: str) -> None:
    """Its text is that of a run without a fault, and it leaves no process behind."""
    command = [*TPI, "run", "-m", model, "-p", "Hello", "--raw", "--temp", "0", "-n", "200", "--local", "2"]
    whole = subprocess.run(command, capture_output=True, env=clean(tmp_path), timeout=100, check=True).stdout
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=clean(tmp_path)
    ) as process:
        assert process.stdout
        assert process.stderr
        first = process.stdout.read(1)
        workers = psutil.Process(process.pid).children()
        os.kill(workers[0].pid, signal.SIGKILL)
        rest, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert first + rest == whole
    assert not any(worker.is_running() for worker in workers)
    assert b"Traceback" not in said
