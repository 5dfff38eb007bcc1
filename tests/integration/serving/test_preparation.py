"""Preparing a request: one client's grammar delays no other client, and takes at most the request's time limit."""

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from master.api.answers.constraint import GrammarConstraint, GrammarShare
from master.api.failures import CLIENT_GONE
from master.api.state import ServeLimits
from tests.support.serving import KEY, MODEL, Served, client, said, tiny_server
from tpi.pack.reader import Pack

CHAT, WAIT_S = "/v1/chat/completions", 60


def of_pattern(pattern: str, **more: Any) -> dict[str, Any]:
    return said(response_format={"type": "regex", "pattern": pattern}, **more)


class SlowGrammars:
    """Grammars of a server that compile only when a test lets them; records which have begun."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.let = Event(), Event()
        self.compiled: list[str] = []
        self._real = served.service._grammars._compile
        monkeypatch.setattr(served.service._grammars, "_compile", self._compile)

    def _compile(self, lark: str, field: str, name: str, share: GrammarShare) -> GrammarConstraint:
        self.compiled.append(lark)
        self.began.set()
        assert self.let.wait(WAIT_S)
        return self._real(lark, field, name, share)


@pytest.fixture
def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowGrammars]:
    slow = SlowGrammars(served, monkeypatch)
    yield slow
    slow.let.set()


@contextmanager
def heard(status: int) -> Iterator[Event]:
    """Yield an event that is set when a request has ended with `status`, by the server's log."""
    found = Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if f" {status} " in record.getMessage():
                found.set()

    log, handler = logging.getLogger("tpi.serve"), Handler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_a_shared_grammar_is_compiled_once_beside_other_answers(http: httpx.Client, slow: SlowGrammars) -> None:
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(http.post, CHAT, json=of_pattern("[a-c]{3}", n=16))
        try:
            assert slow.began.wait(WAIT_S)
            assert http.post(CHAT, json=said(max_tokens=1)).status_code == 200  # while that one is compiled
        finally:
            slow.let.set()
        choices = many.result().json()["choices"]
    assert len(slow.compiled) == 1
    assert len(choices) == 16
    assert {len(choice["message"]["content"]) for choice in choices} == {3}
    assert http.post(CHAT, json=of_pattern("[a-c]{3}")).status_code == 200
    assert len(slow.compiled) == 1  # the last ones are kept


def test_the_grammar_of_a_client_that_left_is_not_compiled(
    served: Served, http: httpx.Client, slow: SlowGrammars
) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(http.post, CHAT, json=of_pattern("[d-f]{3}"))
        assert slow.began.wait(WAIT_S)
        with heard(CLIENT_GONE) as gone:
            body = httpx.Request("POST", served.url, json=of_pattern("[g-i]{3}")).content
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {KEY}\r\nContent-Type: application/json\r\n"
            with closing(socket.create_connection((host, int(port)))) as leaving:
                leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert gone.wait(WAIT_S)
        slow.let.set()
        assert first.result().status_code == 200
    assert http.post(CHAT, json=of_pattern("[j-l]{3}")).status_code == 200
    assert [lark.count("[g-i]") for lark in slow.compiled] == [0, 0]


MULTIPLE = {"type": "integer", "multipleOf": 1999957}
ASKED_IN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a form": (
        CHAT,
        said(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": MULTIPLE}}),
        "response_format.json_schema.schema",
    ),
    "a pattern": (CHAT, of_pattern("(a{1000}){1000}"), "response_format.pattern"),
    "a tool": (
        CHAT,
        said(
            tools=[{"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": MULTIPLE}}}}],
            tool_choice="required",
        ),
        "tools",
    ),
    "a form of responses": (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": MULTIPLE}}},
        "text.format.schema",
    ),
    "a tool of messages": (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {"x": MULTIPLE}}}],
            "tool_choice": {"type": "any"},
        },
        "tools",
    ),
}


def test_costly_grammars_are_refused_and_others_go_on(served: Served, http: httpx.Client) -> None:
    served.service.warm_up()
    before = psutil.Process().memory_info().rss
    with ThreadPoolExecutor(len(ASKED_IN)) as pool:
        costly = {case: pool.submit(http.post, path, json=body) for case, (path, body, _) in ASKED_IN.items()}
        for _ in range(3):
            assert http.post(CHAT, json=said(response_format={"type": "json_object"})).status_code == 200
    for case, asked in costly.items():
        answer, field = asked.result(), ASKED_IN[case][2]
        assert answer.status_code == 400, (case, answer.text)
        assert "too large a grammar" in answer.json()["error"]["message"]
        assert answer.json()["error"].get("param", field) == field
    assert psutil.Process().memory_info().rss - before < 100 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_limit_holds_while_a_request_is_made_ready(
    stream: bool, tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path, ServeLimits(answer_s=0.1)) as served, client(served) as http:
        slow = SlowGrammars(served, monkeypatch)
        answer = http.post(CHAT, json=of_pattern("[a-c]{3}", stream=stream))
        slow.let.set()
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"
