"""Attacks by a real client on a real server; a second client streams meanwhile, and must not be disturbed."""

import json
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.attack import Target, assert_unnoticed, target
from tests.support.house import until
from tests.support.models import TinyModel
from tests.support.serving import said

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(
        tmp_path_factory.mktemp("attacked"), tiny_model("llama").directory, "--alias", "tiny", "--queue", "16"
    ) as served:
        yield served


EDGES: list[dict[str, Any]] = [
    {"temperature": 5e-324}, {"temperature": 1e-310, "top_k": 0, "top_p": 1, "min_p": 0}, {"top_p": 5e-324},
    {"repeat_penalty": 1e-40}, {"repetition_penalty": 5e-324}, {"repeat_penalty": 0.01, "frequency_penalty": 2},
    {"temperature": 1e-300, "logit_bias": {"5": 100, "6": -100}, "logprobs": True, "top_logprobs": 20},
    {"temperature": 5e-324, "response_format": {"type": "json_object"}, "logit_bias": {"2": -100}},
]  # fmt: skip


def test_settings_at_the_edge_of_their_ranges(served: Target) -> None:
    def attack(target: Target) -> None:
        for edge in EDGES:
            for stream in (False, True):
                answer = target.post(CHAT, said(**{"temperature": 1.0, "stream": stream, **edge}))
                assert answer.status_code in (200, 400), answer.text
                assert "model" not in answer.text or answer.status_code == 200, "it is not the model's fault"
                assert '"error"' not in answer.text or not stream or answer.status_code == 400, answer.text

    assert_unnoticed(served, attack)


GREEDY: dict[str, Any] = {"ignore_eos": True, "max_tokens": 4000}
STARVING: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "many long answers": [(CHAT, said(**{**GREEDY, "n": 16, "stream": True}))] * 4,
    "many full contexts": [(TEXT, {**GREEDY, "prompt": ["Hello you " * 60] * 16, "max_tokens": 100})] * 4,
    "many requests": [(TEXT, {**GREEDY, "prompt": "Hello", "stream": True, "max_tokens": 60})] * 100,
    "embeddings": [("/v1/embeddings", {"input": ["Hello you " * 60] * 200})] * 4,
    "counting": [("/v1/messages/count_tokens", {"model": "tiny", "messages": [
        {"role": "user", "content": "Hello you " * 1500}]})] * 300,
}  # fmt: skip


@pytest.mark.parametrize("kind", STARVING)
def test_one_client_does_not_starve_another(kind: str, served: Target) -> None:
    def attack(target: Target) -> None:
        with ThreadPoolExecutor(100) as pool:
            statuses = list(pool.map(lambda one: target.post(*one).status_code, STARVING[kind]))
        assert set(statuses) <= {200, 400, 429}, statuses

    assert_unnoticed(served, attack)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES: dict[str, bytes] = {
    "nothing": b"",
    "half a header": b"GET /health HTTP/1.1\r\nHost: loc",
    "half a body": HEAD + b"Content-Length: 500\r\n\r\n{",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n{",
    "an answer and half a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTT",
}
CONNECTIONS = 2100


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + 500:
        pytest.skip(f"{hard} open files are too few for {CONNECTIONS} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CONNECTIONS + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def held(target: Target, stack: ExitStack, begin: bytes) -> socket.socket:
    """Open a connection that has sent a given text and sends no more."""
    one = stack.enter_context(socket.create_connection(("127.0.0.1", target.port), timeout=60))
    one.sendall(begin)
    return one


@pytest.mark.parametrize("half", HALVES)
def test_silent_connections_shut_no_client_out(half: str, served: Target, descriptors: None) -> None:
    def attack(target: Target) -> None:
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                held(target, stack, HALVES[half])
            with httpx.Client(base_url=target.http.base_url, timeout=60) as fresh:
                assert fresh.post(CHAT, json=said()).status_code == 200

    before = served.descriptors
    assert_unnoticed(served, attack, wait=10.0)  # as new connections come after thousands of others
    until(lambda: served.descriptors <= before + 3)


STRANGE: dict[str, bytes] = {
    "an absurd header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000,
    "headers without end": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100_000,
    "pipelined requests": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000,
    "chunks of one byte": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100_000,
    "HTTP/1.0": b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00" * 1000,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ",
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_requests_are_answered_or_closed(kind: str, served: Target) -> None:
    def attack(target: Target) -> None:
        for _ in range(5):
            with ExitStack() as stack, suppress(ConnectionError):
                one = held(target, stack, STRANGE[kind])
                with suppress(OSError):  # the server may have closed the connection already
                    one.shutdown(socket.SHUT_WR)
                got = b"".join(iter(lambda: one.recv(65536), b""))  # noqa: B023 - called at once
                assert b"HTTP/1.1 5" not in got, got[:500]

    assert_unnoticed(served, attack)


def test_readers_that_stop_are_no_burden(served: Target) -> None:
    body = json.dumps(said(stream=True, max_tokens=4000, logprobs=True, top_logprobs=20)).encode()

    def attack(target: Target) -> None:
        with ExitStack() as stack:
            for _ in range(60):
                held(target, stack, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    assert_unnoticed(served, attack)


MIXED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", CHAT, said(max_tokens=2)),
    ("POST", CHAT, said(max_tokens=2, stream=True, n=2, logprobs=True, top_logprobs=3)),
    ("POST", CHAT, said(max_tokens=2, seed=1, temperature=1.5, response_format={"type": "json_object"})),
    ("POST", CHAT, said(max_tokens=2, cache_salt="x", tools=[{"type": "function", "function": {"name": "f"}}])),
    ("POST", CHAT, {"messages": []}),
    ("POST", CHAT, said("Hello " * 5000)),
    ("POST", TEXT, {"prompt": ["Hello", "you"], "max_tokens": 2, "echo": True}),
    ("POST", TEXT, {"prompt": [5, 999999]}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 2, "stream": True}),
    ("POST", "/v1/responses", {"input": "Hello", "previous_response_id": "resp_0"}),
    ("POST", "/v1/embeddings", {"input": ["Hello", "you"]}),
    ("POST", MESSAGES, {"model": "tiny", "max_tokens": 2, "messages": said()["messages"]}),
    ("POST", MESSAGES, {"model": "tiny", "max_tokens": 2, "messages": said()["messages"], "stream": True}),
    ("POST", f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": said()["messages"]}),
    ("GET", "/v1/models", None), ("GET", "/v1/models/tiny", None), ("GET", "/v1/models/other", None),
    ("GET", "/health", None), ("GET", "/metrics", None), ("GET", "/house", None), ("GET", "/", None),
    ("GET", "/openapi.json", None), ("GET", "/nowhere", None), ("DELETE", "/v1/models", None),
]  # fmt: skip
REQUESTS, AT_ONCE, GROWTH = 2000, 8, 24 << 20


def test_thousands_of_mixed_requests_leave_nothing_behind(served: Target) -> None:
    """Memory, descriptors and threads are back at their numbers after the first hundreds of requests."""
    limits = httpx.Limits(max_connections=AT_ONCE)
    with (
        httpx.Client(base_url=served.http.base_url, timeout=100, limits=limits) as http,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def ask(number: int) -> int:
            method, path, body = MIXED[number % len(MIXED)]
            with http.stream(method, path, json=body) as answer:
                if number % 7:  # else the client leaves
                    answer.read()
                return answer.status_code

        def idle() -> tuple[int, int, int]:
            until(lambda: served.gauge("num_requests_running") + served.gauge("num_requests_waiting") == 0)
            return served.memory, served.descriptors, served.threads

        list(pool.map(ask, range(REQUESTS // 4)))
        before = idle()
        statuses = set(pool.map(ask, range(REQUESTS)))
        after = idle()
    assert statuses == {200, 400, 404, 405}
    assert after[0] - before[0] < GROWTH
    assert after[1] <= before[1] + 2
    assert after[2] <= before[2] + 1
    assert served.gauge("kv_cache_usage_perc") == 0


def nested(depth: int) -> str:
    """Return JSON of nested lists."""
    return "[" * depth + "]" * depth


def called(arguments: str) -> dict[str, Any]:
    """Return a conversation with an earlier tool call of these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]
    return said() | {"messages": turns}


def shaped(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a request for JSON that follows a schema."""
    return said(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


GROWING = {"type": "integer", "multipleOf": 1_999_957}
MOST_GROWTH = 128 << 20
CLIMBING: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "schemas that grow": [
        (CHAT, shaped(GROWING)),
        (CHAT, shaped({"allOf": [{"type": "integer"}, GROWING]})),
        (CHAT, shaped({"type": "string", "maxLength": 10_000_000, "minLength": 9_999_999})),
        (CHAT, said(tool_choice="required", tools=[{"type": "function", "function": {
            "name": "f", "parameters": {"type": "object", "properties": {"x": GROWING}}}}])),
        (CHAT, said(response_format={"type": "regex", "pattern": "(((a{0,99}){0,99}){0,99}){0,99}"})),
    ],
    "names that a template has of its own": [
        (CHAT, said(chat_template_kwargs={name: "x"}))
        for name in ("messages", "self", "replay", "tools", "add_generation_prompt", "raise_exception", "loop")
    ],
    "arguments of an earlier call": [
        (CHAT, called(arguments))
        for arguments in (
            nested(900), nested(100_000), "[" + "[]," * 900_000 + "[]]", "{", "NaN", '"\\ud800"', "1" * 5000,
            "[" + "," * 140_000 + '"' + '\\"' * 200_000,
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", CLIMBING)
def test_bodies_that_cost_much_more_than_they_are_long(kind: str, served: Target) -> None:
    def attack(target: Target) -> None:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: target.post(*one), CLIMBING[kind] * 2))
        assert {answer.status_code for answer in answers} <= {200, 400, 413}, [answer.text for answer in answers]

    before = served.memory
    assert_unnoticed(served, attack)
    assert served.memory - before < MOST_GROWTH


def test_a_template_outlasts_nothing(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """A template that computes without end in C is stopped, and other clients of the server do not wait for it."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama").directory, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    doubling = (
        "{% if messages[0].content == 'loop' %}{% set a = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}{% endif %}"
    )
    settings["chat_template"] = doubling + settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))

    def attack(target: Target) -> None:
        assert target.post(CHAT, said("loop")).status_code == 400

    (tmp_path / "log").mkdir()
    with target(tmp_path / "log", model) as served:
        assert_unnoticed(
            served, attack, wait=60.0
        )  # prompts are read in turn: another's waits for one rendering at most
