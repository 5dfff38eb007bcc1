"""A thousand connections send requests at once; some read slowly and some leave. /health answers meanwhile."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from time import process_time
from urllib.parse import urlsplit

import pytest

from master.api.state import ServeLimits
from tests.support.house import until
from tests.support.paths import ROOT
from tests.support.serving import Served, client, tiny_server
from tpi.pack.reader import Pack

CLIENTS, WAITING, AT_ONCE = 1000, 40, 8
HEALTH_S, EVERY_S, TRIES = 0.2, 0.02, 3  # of processor time; `benchmarks crowd` looks at the clock, 99 times of 100
DESCRIPTORS = CLIENTS + 500


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        pytest.skip(f"{hard} open files are too few for {CLIENTS} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def pinged(url: str) -> Iterator[list[float]]:
    """Yield the seconds of this process for each /health, over a new connection each time, until the block ends."""
    at, over, seconds = urlsplit(url), Event(), list[float]()

    def ping() -> None:
        while not over.wait(EVERY_S):
            begun = process_time()
            with closing(HTTPConnection(str(at.hostname), at.port, timeout=60)) as connection:
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            seconds.append(process_time() - begun)

    thread = Thread(target=ping)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def come_and_go(served: Served) -> float:
    """Run all clients: each is answered or told to come back.

    Return the seconds that 19 of 20 /health requests took at most.
    """
    with pinged(served.url) as seconds:
        command = [sys.executable, "-m", "tests.support.processes.crowd", served.url, str(CLIENTS)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    ends = json.loads(done.stdout)
    assert set(ends) <= {"done", "left", "told to come back"}, ends
    assert sum(ends.values()) == CLIENTS
    assert ends["told to come back"] > 0
    assert ends["done"] + ends["left"] >= WAITING
    assert ends["done"]
    until(lambda: served.thread.open == 0)
    assert served.pages_in_use == 0
    with client(served) as http:
        assert "vllm:num_requests_running{" in http.get("/metrics").text
    assert len(seconds) > 1
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


def test_1000_clients(descriptors: None, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    limits = ServeLimits(waiting=WAITING)
    with tiny_server(tiny_pack("llama"), tmp_path, limits, pool=30, most=AT_ONCE) as served:
        assert any(come_and_go(served) < HEALTH_S for _ in range(TRIES))
