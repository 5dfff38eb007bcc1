"""Idle programs keep working: closed connections and silent streams cause no errors.

`python -m benchmarks left_alone` waits ten real minutes; here the server's timeouts are short.
"""

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event

import httpx
import pytest

from master.api import server, streams
from tests.support.serving import KEY, said, tiny_server
from tpi.pack.reader import Pack

CHAT = "/v1/chat/completions"


def test_a_connection_that_was_closed_for_idling_is_no_end(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page, or a client with a pool of connections, sends the next request over a new connection."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    with tiny_server(tiny_pack("llama"), tmp_path, key=None) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with (
            httpx.Client(base_url=served.url, timeout=60) as http,
            closing(socket.create_connection((host, int(port)), timeout=60)) as watched,
        ):
            before = http.post(CHAT, json=said()).json()["choices"]
            watched.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            while watched.recv(4096):  # an answer, then the end: the pool's connection is older
                pass
            assert http.post(CHAT, json=said()).json()["choices"] == before


def test_a_stream_in_which_nothing_comes_says_that_it_lives(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_PULSE_S", 0.02)
    with tiny_server(tiny_pack("llama"), tmp_path) as served:
        step, go_on = served.engine.step, Event()

        def held_up() -> None:
            """Make steps slow, as with a silent worker or a long prompt."""
            assert go_on.wait(60)
            step()

        monkeypatch.setattr(served.engine, "step", held_up)
        headers = {"x-api-key": KEY}
        with httpx.stream("POST", served.url + CHAT, json=said(stream=True), headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(3):
                assert next(line for line in lines if line.startswith(":")) == streams.PULSE.strip()
            go_on.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
