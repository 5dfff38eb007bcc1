"""Helpers of the testbed's tests: rights to namespaces, small topologies, echo programs, remains."""

import functools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from testbed.cgroups import find_hierarchies
from testbed.checks.verify import LinkMeasurement, verify
from testbed.launch import Testbed
from testbed.network.namespaces import new_namespace, require_root
from tpi.errors import TestbedError
from tpi.topology.topology import Host, HostLink, Topology, star

PATIENCE_S = 60.0  # other guests of a shared host keep the processors busy for as long
TPI = [sys.executable, "-m", "tpi.cli", "testbed"]

# Sends everything back that it gets, to any number of clients at once.
ECHO = """
import selectors, socket, sys
server = socket.create_server((sys.argv[1], 9990))
select = selectors.DefaultSelector()
select.register(server, selectors.EVENT_READ)
print("echo listens on", sys.argv[1], flush=True)
while True:
    for key, _ in select.select():
        if key.fileobj is server:
            client, _ = server.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            select.register(client, selectors.EVENT_READ)
        else:
            data = key.fileobj.recv(1 << 20)
            if data:
                key.fileobj.sendall(data)
            else:
                select.unregister(key.fileobj)
                key.fileobj.close()
"""

# Prints round trip times in ms of argv[2] messages of argv[3] bytes, one after the other.
CLIENT = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 9990), 10)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
size = int(sys.argv[3])
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    client.sendall(b"x" * size)
    got = 0
    while got < size:
        data = client.recv(1 << 20)
        assert data
        got += len(data)
    print((time.perf_counter() - started) * 1e3, flush=True)
"""


@functools.cache
def _obstacle() -> str | None:
    """Return the reason why this process cannot create namespaces; empty if it can."""
    try:
        require_root()
        os.close(new_namespace())
        with Path("/dev/net/tun").open("rb"):
            return None
    except (OSError, TestbedError) as error:
        return str(error)


needs_root = pytest.mark.skipif(_obstacle() is not None, reason=f"no namespaces here: {_obstacle()}")


def pair(bandwidth: float = 1e9, latency: float = 1e-3, **link: float) -> Topology:
    """Return two devices on one cable."""
    return Topology("pair", (Host("a"), Host("b")), (HostLink(("a", "b"), bandwidth, latency, **link),))


def wheel(count: int, bandwidth: float, latency: float, shared: float | None = None) -> Topology:
    """Return `count` devices around a router: a, b, c, ..."""
    devices = tuple(Host(chr(ord("a") + i)) for i in range(count))
    return star("wheel", devices, HostLink(("", ""), bandwidth, latency), shared)


@contextmanager
def started(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """Yield a process, and kill it at the end of the block, also after an error."""
    try:
        yield process
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # frozen; the testbed ends it
            process.wait(10)


class StderrLog:
    """The lines that a process writes to stderr, each with its time on `time.monotonic`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        self._stream = process.stderr
        self._lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._listen)

    @property
    def text(self) -> str:
        """All lines so far as one text."""
        return "".join(line for _, line in self._lines)

    def after(self, begun: float, words: str) -> float:
        """Return the seconds from `begun` to the first line with `words`; infinity if there is none."""
        return next((at - begun for at, line in self._lines if words in line), math.inf)

    def __enter__(self) -> "StderrLog":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()

    def _listen(self) -> None:
        for line in self._stream:
            self._lines.append((time.monotonic(), line.decode()))


@contextmanager
def echo_on(bed: Testbed, device: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `ECHO` on `device` during the block, once it listens."""
    command = [sys.executable, "-c", ECHO, bed.address(device)]
    with started(bed.popen(device, command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        with process.stdout:
            assert "listens" in process.stdout.readline()
        yield process


def round_trip_ms(bed: Testbed, source: str, target: str, count: int, size: int) -> list[float]:
    """Return sorted round trip times in ms between `source` and the echo on `target`."""
    command = [sys.executable, "-c", CLIENT, bed.address(target), str(count), str(size)]
    process = bed.popen(source, command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return sorted(float(line) for line in output.split())


def verified(bed: Testbed) -> list[LinkMeasurement]:
    """Repeat `verify` until it succeeds, since a busy machine may fail for minutes; return the measurements."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(TestbedError):
            return verify(bed)
    return verify(bed)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until `condition`, which another process fulfils, returns True."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


def traces(root: Path, name: str) -> list[str]:
    """Return descriptions of everything of the testbed `name` that is still on this machine."""
    hierarchies = find_hierarchies()
    roots = [hierarchies.unified] if hierarchies.unified else list(hierarchies.version1.values())
    found = [str(folder) for top in roots for folder in top.glob(f"tpi-{name}*")]
    found += [str(folder) for folder in (root / name, Path("/tmp", f"tpi-testbed-{name}")) if folder.exists()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _belongs(entry, name):
            found.append(f"process {entry.name}")
    return found


def _belongs(process: Path, name: str) -> bool:
    """Return True if a process has the testbed's mark in its environment, or its name in the command line."""
    try:
        marks = (process / "environ").read_bytes().split(b"\0")
        return f"TPI_TESTBED={name}".encode() in marks or name.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
