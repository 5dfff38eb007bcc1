"""A thousand clients at once, a hundred of them slow: the server's memory, and whether it stays responsive."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from threading import Event, Thread
from time import perf_counter
from urllib.parse import urlsplit

import httpx

from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.server import Running, question, running, together

NOTES = """
`tpi serve` with SmolLM2-135M in Q4_1 on one node. The clients are a separate process on the same two cores. Nine of ten
ask for 8 tokens. Every tenth asks for 64 tokens with 20 log probabilities each, over a socket with a small buffer, and
pauses 60 times for a quarter of a second, after every 2 KiB. So the server must hold the data that the client does not
read. All memory that the server plans for is touched before the measurement: the KV cache by prompts that fill it, and
the libraries by a first small crowd. The figure is the peak resident memory above that. /health is requested all the
time, alternately over a persistent connection and over a new one.
"""
_MEMORY_MIB, _HEALTH_MS = 200.0, 200.0
_CONTEXT, _PARALLEL = 1024, 4
_EVERY_S = 0.05


@dataclass
class Watch:
    """Observations during the crowd: peak resident MiB, and seconds of /health over a kept and over new connections."""

    peak: float = 0.0
    kept: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)


def bench(quick: bool) -> Result:
    """Measure a crowd of 1000 clients, or 50 if `quick`."""
    count = 50 if quick else 1000
    flags = ("-c", str(_CONTEXT), "--parallel", str(_PARALLEL), "--queue", str(2 * count))
    with running(*flags) as server:
        bare = server.mib
        asyncio.run(together(server.url, [question(f"{n} {'so on ' * 450}", 2) for n in range(_PARALLEL)]))
        _crowd(server, 20)
        idle, begun = server.mib, perf_counter()
        with watched(server) as watch:
            ends = _crowd(server, count)
        seconds = perf_counter() - begun
        left = _left(server)
    return _result(count, bare, idle, seconds, watch, ends, left)


def _result(
    count: int, bare: float, idle: float, seconds: float, watch: Watch, ends: "Counter[str]", left: int
) -> Result:
    good = sum(ends[end] for end in ("done", "error", "429", "503"))
    kept, fresh = (_p99(pings) for pings in (watch.kept, watch.fresh))
    row: Row = {
        "clients": count,
        "done": ends["done"],
        "ended with an error": ends["error"],
        "refused (429, 503)": ends["429"] + ends["503"],
        "no proper end": count - good,
        "s": seconds,
        "/health p99 ms": 1e3 * kept,
        "on a new connection": 1e3 * fresh,
        "idle MiB": idle,
        "of these touched before": idle - bare,
        "MiB above idle": watch.peak - idle,
    }
    checks = [
        Check("streams without a proper end", count - good, 0, within=0),
        Check("MiB above idle in a crowd", watch.peak - idle, _MEMORY_MIB, at_most=True),
        Check("ms of /health in a crowd, p99", 1e3 * kept, _HEALTH_MS, at_most=True),
        Check("ms of /health on new connections in a crowd, p99", 1e3 * fresh, _HEALTH_MS, at_most=True),
        Check("requests and pages left after the crowd", left, 0, within=0),
    ]
    return Result("Many clients at once", NOTES, [Table("", [row])], checks)


@contextmanager
def watched(server: Running) -> Iterator[Watch]:
    """Observe the server's memory, and request /health, until the end of the block."""
    watch, over = Watch(), Event()

    def look() -> None:
        stays = _connection(server)
        while not over.wait(_EVERY_S):
            watch.peak = max(watch.peak, server.mib)
            watch.kept.append(_ping(stays))
            new = _connection(server)
            watch.fresh.append(_ping(new))
            new.close()
        stays.close()

    thread = Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def _connection(server: Running) -> HTTPConnection:
    at = urlsplit(server.url)
    return HTTPConnection(str(at.hostname), at.port, timeout=60)


def _ping(connection: HTTPConnection) -> float:
    begun = perf_counter()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status
    return perf_counter() - begun


def _crowd(server: Running, count: int) -> "Counter[str]":
    at = urlsplit(server.url)
    command = [sys.executable, "-m", "benchmarks.serving.clients", str(at.hostname), str(at.port), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Counter(json.loads(done.stdout))


def _left(server: Running) -> int:
    """Return how many requests are under way and pages in use, once no client is connected."""
    for _ in range(100):
        house = httpx.get(f"{server.url}/house", timeout=60).json()
        left = int(house["running"] + house["waiting"] + house["pages"]["held"])
        if not left:
            break
        Event().wait(_EVERY_S)
    return left


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]
