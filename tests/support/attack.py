"""Tests of attacks: a real `tpi serve`, an attacker, and a bystander process that the attack must not disturb.

A case is a function that attacks the server; `assert_unnoticed` runs the case while the bystander streams.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.paths import ROOT
from tests.support.started import server

BYSTANDER = "127.0.0.2"  # Linux answers at all of 127.0.0.0/8: a client of another address than the attacker's
MOST_S = 1.0
"""A gap in a stream, or a wait for its first token, that is noticed on an idle machine."""
TRIES = 3
_LOADED = 8  # times the quietest longest gap: what a busy machine makes of it by itself


@dataclass(frozen=True)
class Observations:
    """The bystander's observations; times in seconds."""

    gap: float
    wait: float
    streams: int
    wrong: list[str]


@dataclass
class Target:
    """A server under attack."""

    process: "subprocess.Popen[str]"
    http: httpx.Client
    log: Path

    @property
    def port(self) -> int:
        """The port at 127.0.0.1 on which the server listens."""
        assert self.http.base_url.port
        return self.http.base_url.port

    @property
    def threads(self) -> int:
        """The number of threads of the server's process."""
        return psutil.Process(self.process.pid).num_threads()

    @property
    def descriptors(self) -> int:
        """The number of open files and sockets of the server's process."""
        return psutil.Process(self.process.pid).num_fds()

    @property
    def memory(self) -> int:
        """The bytes of memory that the server and its children hold."""
        whole = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in (whole, *whole.children(recursive=True)))

    def gauge(self, name: str) -> float:
        """Return the figure `name` of `/metrics`."""
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"vllm:{name}{{")).rpartition(" ")[2])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send one request of the attacker, and return its answer."""
        return self.http.post(path, json=body)


@contextmanager
def target(folder: Path, model: Path, *flags: str) -> Iterator[Target]:
    """Run a server of `model` during the block."""
    with server(folder, "-m", str(model), "-t", "1", *flags) as (process, http):
        yield Target(process, http, folder / "log")


@contextmanager
def beside(target: Target) -> Iterator[list[Observations]]:
    """Run a bystander during the block; afterwards the yielded list has its observations."""
    url, pid = str(target.http.base_url), str(target.process.pid)
    command = [sys.executable, "-m", "tests.support.processes.bystander", url, BYSTANDER, pid]
    found: list[Observations] = []
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "streams\n"
            yield found
            said, _ = process.communicate(timeout=300)
            found.append(Observations(**json.loads(said)))
        finally:
            process.kill()


def quiet(target: Target) -> float:
    """Return the longest gap or wait, in seconds, of a bystander without an attack."""
    with beside(target) as found:
        pass
    return max(found[0].gap, found[0].wait)


def assert_unnoticed(target: Target, attack: Callable[[Target], None], wait: float = 1.0) -> None:
    """Attack while a bystander streams, and check that it has no error, no long gap and no wait `wait` times as long.

    Gaps and waits are compared with those without an attack. One of several tries must pass; no try may have errors.
    """
    seen = []
    for _ in range(TRIES):
        most = max(MOST_S, _LOADED * quiet(target))
        with beside(target) as found:
            attack(target)
        assert not found[0].wrong, found[0].wrong
        seen.append((found[0], most))
        if max(found[0].gap, found[0].wait / wait) < most:
            break
    else:
        raise AssertionError(seen)
    assert target.http.get("/health").json() == {"status": "ok"}
    assert "Traceback" not in target.log.read_text(), target.log.read_text()[-3000:]
