"""Connections: which one is closed if there are too many, or if a client sends or reads nothing for too long."""

import asyncio
import resource
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from master.api import connections
from master.api.connections import (
    DRAINED_S,
    HEADER_S,
    KEEP_ALIVE_S,
    MOST_CHUNKS,
    STALLED_S,
    Connections,
    HttpConnection,
    most_connections,
)

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that stores what is written; `unsent` is the number of bytes that the client has not taken."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)})
        self.sent, self.unsent, self.aborted, self.closed = b"", 0, False, False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = self.closed = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class House:
    """A server's connections, whose answers wait until a test lets them go."""

    def __init__(self, most: int) -> None:
        self.kept, self.go = Connections(most), asyncio.Event()
        self.crowded: list[bool] = []
        config = uvicorn.Config(
            self.app, http=self.kept.protocol, interface="asgi3", log_config=None, timeout_keep_alive=int(KEEP_ALIVE_S)
        )
        config.load()
        state = ServerState()
        self.make: Any = lambda: self.kept.protocol(config=config, server_state=state, app_state={})

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.crowded.append(bool(scope["state"].get("crowded")))
        while (await receive()).get("more_body"):
            pass
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def connect(self, data: bytes = b"", address: str = "10.0.0.1") -> tuple[HttpConnection, Wire]:
        one, wire = self.make(), Wire(address)
        one.connection_made(wire)
        if data:
            one.data_received(data)
        return one, wire


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_longest_silent_connection_is_closed_first() -> None:
    async def run() -> None:
        house = House(6)
        busy, silent, half, body = (house.connect(data)[1] for data in (GET, b"", b"GET /he", POST))
        further = [house.connect()[1] for _ in range(3)]
        assert [wire.aborted for wire in (busy, silent, half, body, *further)] == [False, *[True] * 3, *[False] * 3]
        house.go.set()
        await settled()
        assert b"200 OK" in busy.sent

    asyncio.run(run())


def test_where_none_is_silent_the_newcomer_is_told_to_come_back() -> None:
    async def run() -> None:
        house = House(3)
        wires = [house.connect(GET)[1] for _ in range(3)]
        await settled()
        assert house.crowded == [False, False, True]
        assert not any(wire.aborted for wire in wires)
        house.go.set()
        await settled()

    asyncio.run(run())


def test_the_network_with_most_connections_loses_one() -> None:
    async def run() -> None:
        house = House(4)
        quiet = house.connect(address="10.0.0.9")[1]
        many = [house.connect(address="10.0.0.1")[1] for _ in range(10)]
        assert not quiet.aborted
        assert [wire.aborted for wire in many] == [True] * 7 + [False] * 3

    asyncio.run(run())


def test_one_network_leaves_places_to_others() -> None:
    async def run() -> None:
        house = House(8)
        busy = [house.connect(GET, address="10.0.0.1")[1] for _ in range(7)]
        other = house.connect(GET, address="10.0.0.9")[1]
        await settled()
        assert house.crowded == [False] * 6 + [True, False]
        assert not any(wire.aborted for wire in (*busy, other))
        house.go.set()
        await settled()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "trickle", "late"),
    [
        (b"", b"", HEADER_S),
        (b"GET /hea", b"X", HEADER_S),  # what trickles in gives no more time
        (GET, b"", KEEP_ALIVE_S),
        (GET + b"GET /hea", b"X", HEADER_S),
    ],
)
def test_half_a_header_has_a_deadline(data: bytes, trickle: bytes, late: float) -> None:
    async def run() -> None:
        house = House(4)
        house.go.set()
        one, wire = house.connect(data)
        await settled()
        for _ in range(3):
            if trickle:
                one.data_received(trickle)
        now = asyncio.get_running_loop().time()
        house.kept.sweep(now + late - 1)
        assert not wire.aborted
        house.kept.sweep(now + late + 1)
        assert wire.aborted

    asyncio.run(run())


def test_what_is_not_read_has_a_deadline() -> None:
    async def run() -> None:
        house = House(4)
        house.go.set()
        one, wire = house.connect(GET)
        await settled()
        now = asyncio.get_running_loop().time()
        for second in range(int(DRAINED_S) - 1):  # a slow reader
            wire.unsent = int(2 * DRAINED_S) - second
            assert not one.is_late(now + second)
        assert one.is_late(now + DRAINED_S + 1)
        other, stalled = house.connect(GET)
        stalled.unsent = 5
        assert not other.is_late(now)
        assert not other.is_late(now + STALLED_S - 1)
        assert other.is_late(now + STALLED_S + 1)

    asyncio.run(run())


CHUNKED = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("chunks", "refused"), [(MOST_CHUNKS, False), (MOST_CHUNKS + 1, True)])
def test_a_body_of_too_many_chunks_is_refused(chunks: int, refused: bool) -> None:
    async def run() -> None:
        house = House(4)
        house.go.set()
        one, wire = house.connect(CHUNKED)
        one.data_received(b"1\r\n \r\n" * chunks)
        assert wire.closed == refused
        assert (b" 400 " in wire.sent) == refused
        if refused:
            one.connection_lost(None)
        else:
            one.data_received(b"0\r\n\r\n" + CHUNKED + b"1\r\n \r\n" * chunks + b"0\r\n\r\n")
        await settled()
        assert wire.sent.count(b" 200 ") == (0 if refused else 2)  # each request has its own

    asyncio.run(run())


def test_a_broken_body_after_the_answer_closes_the_connection() -> None:
    async def run() -> None:
        house = House(4)
        one, wire = house.connect(CHUNKED)
        one.conn.send(h11.Response(status_code=401, headers=[(b"content-length", b"0")]))
        one.data_received(b"no chunk\r\n")
        assert wire.aborted

    asyncio.run(run())


def test_there_are_no_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for soft in (64, 400, 100_000, resource.RLIM_INFINITY):
        monkeypatch.setattr(connections, "resource", SimpleNamespace(
            getrlimit=lambda which, soft=soft: (soft, soft), RLIMIT_NOFILE=0, RLIM_INFINITY=resource.RLIM_INFINITY
        ))  # fmt: skip
        found[soft] = most_connections()
    assert found[64] == 16
    assert 16 <= found[400] <= 168
    assert found[100_000] == found[resource.RLIM_INFINITY] == 2048
