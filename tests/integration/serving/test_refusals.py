"""Errors in a request are reported in the API's own form, with the field; other clients and sites get nothing."""

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from master.api.state import ServeLimits
from tests.support.serving import KEY, MODEL, Served, client, said, tiny_server
from tpi.pack.reader import Pack

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

SHORT = {"role": "user", "content": "x"}
SECONDS, TRIES = 0.1, 5  # of processor time in the server and this client; the best of the tries counts


def deep(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def called(arguments: str) -> dict[str, Any]:
    """Return the body of a chat completion after a tool call with these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}


def typed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": schema}}


INNER = {
    "deep": '{"a":' * 900 + "1" + "}" * 900,
    "deeper than a parser": "[" * 100_000,
    "wide": '{"a":[' + ",".join(["[]"] * 300_000) + "]}",
    "with half a character": r'{"a": "\ud800"}',
    "with a name of half a character": r'{"\udc00": 1}',
    "not a number": '{"a": NaN}',
    "infinite": '{"a": -Infinity}',
    "beyond floats": '{"a": 1e999}',
    "a long number": f'{{"a": {"9" * 3000}}}',
    "too long a number": f'{{"a": {"9" * 10_000}}}',
}
RESERVED = (
    *("messages", "self", "replay", "tools", "bos_token", "add_generation_prompt", "raise_exception", "namespace"),
    *("range", "loop", "__class__", "_x", "true", "if", "a b", "1a", "", "\u00e9", "caller", "context"),
)

BAD: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a huge prompt": (CHAT, said("x" * 1_000_000), "messages"),
    "a prompt over the context": (CHAT, said("Hello you " * 200), "messages"),
    "a negative limit": (CHAT, said(max_tokens=-2), "max_tokens"),
    "no tokens at all": (CHAT, said(max_tokens=0), "max_tokens"),
    "a limit that is text": (CHAT, said(max_tokens="5"), "max_tokens"),
    "a temperature below 0": (CHAT, said(temperature=-0.1), "temperature"),
    "top_p below 0": (CHAT, said(top_p=-0.1), "top_p"),
    "too many choices": (CHAT, said(n=1000), "n"),
    "an unknown model": (CHAT, said(model="gpt-9"), "model"),
    "no messages": (CHAT, {"messages": []}, "messages"),
    "messages that are missing": (CHAT, {}, "messages"),
    "a wrong role": (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "content of a number": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    "an image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    "half a character": (CHAT, said("\ud800"), "messages"),
    "an empty stop": (CHAT, said(stop=""), "stop"),
    "too many stops": (CHAT, said(stop=["a"] * 100), "stop"),
    "a bias of no token": (CHAT, said(logit_bias={"999999": 1}), "logit_bias"),
    "a bias of text": (CHAT, said(logit_bias={"x": 1}), "logit_bias.x"),
    "top_logprobs alone": (CHAT, said(top_logprobs=2), "top_logprobs"),
    "a broken schema": (CHAT, said(response_format=SCHEMA), "response_format.json_schema.schema"),
    "a form that is none": (CHAT, said(response_format={"type": "xml"}), "response_format"),
    "a broken pattern": (CHAT, said(response_format={"type": "regex", "pattern": "(a"}), "response_format.pattern"),
    "a tool without name": (CHAT, said(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
    "a choice of no tools": (CHAT, said(tool_choice="required"), "tool_choice"),
    "a choice of another tool": (
        CHAT,
        said(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "run"}}),
        "tool_choice",
    ),
    "two tools of one name": (CHAT, said(tools=[TOOL, TOOL]), "tools"),
    "a tool of a broken schema": (
        CHAT,
        said(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}], tool_choice="required"
        ),
        "tools",
    ),
    "a schema that is too large": (
        CHAT,
        said(response_format={"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}),
        "response_format.json_schema.schema",
    ),
    "biases without end": (CHAT, said(logit_bias={str(token): 1 for token in range(20_000)}), "logit_bias"),
    "messages without end": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 40_000}, "messages"),
    "more messages than tokens": (CHAT, {"messages": [SHORT] * 10_000}, "messages"),
    "more items than tokens": ("/v1/responses", {"input": [SHORT] * 10_000}, "input"),
    "a long text of a response": ("/v1/responses", {"input": "Hello you " * 200}, "input"),
    "tools without end": (CHAT, said(tools=[TOOL] * 10_000), "tools"),
    "values without end": (CHAT, said(metadata=["x"] * 300_000), None),
    "lists without end": (CHAT, said(metadata=[[]] * 900_000), None),
    "values in values": (CHAT, said(metadata=deep(200)), "metadata"),
    "an empty prompt": (TEXT, {"prompt": ""}, "prompt"),
    "a token that is none": (TEXT, {"prompt": [5, 999999]}, "prompt"),
    "a negative token": (TEXT, {"prompt": [-1]}, "prompt"),
    "no prompt": (TEXT, {}, "prompt"),
    "a seed that is text": (TEXT, {"prompt": "x", "seed": "y"}, "seed"),
    "an embedding of nothing": ("/v1/embeddings", {"input": []}, "input"),
    "shorter embeddings": ("/v1/embeddings", {"input": "x", "dimensions": 3}, "dimensions"),
    "an item that is none": ("/v1/responses", {"input": [{"type": "video"}]}, "input[0].type"),
    "an unknown response": ("/v1/responses", {"input": "x", "previous_response_id": "y"}, "previous_response_id"),
}


BAD |= {
    **{
        f"arguments that are {name}": (CHAT, called(text), "messages[1].tool_calls[0].function.arguments")
        for name, text in INNER.items()
    },
    **{
        f"arguments of an item that are {name}": (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "a", "name": "look", "arguments": text}]},
            "input[0].arguments",
        )
        for name, text in INNER.items()
    },
    **{
        f"a template's {name!r}": (
            CHAT,
            said(chat_template_kwargs={name: 1}),
            f"chat_template_kwargs.{ascii(name)[1:-1]}",
        )
        for name in RESERVED
    },
    "a schema with a number that is none": (CHAT, said(tools=[typed({"minimum": float("nan")})]), "tools"),
    "an infinite temperature": (CHAT, said(temperature=float("inf")), "temperature"),
    "a temperature beyond floats": (CHAT, said(temperature=10**400), "temperature"),
    "a seed beyond floats": (TEXT, {"prompt": "x", "seed": 10**4000}, "seed"),
    "a long token": (TEXT, {"prompt": [10**400]}, "prompt"),
}


ELSEWHERE = {"an unknown model", "an unknown response"}  # what is asked for is not here


@pytest.mark.parametrize("case", BAD)
def test_api_abuse(case: str, http: httpx.Client) -> None:
    path, body, field = BAD[case]
    content, times = json.dumps(body), list[float]()
    while not times or (min(times) >= SECONDS and len(times) < TRIES):  # others may be at work in these caches, too
        begun = time.process_time()
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        times.append(time.process_time() - begun)
    assert min(times) < SECONDS
    error = answer.json()["error"]
    assert answer.status_code == (404 if case in ELSEWHERE else 400), error
    assert error["param"] == field
    assert error["message"]
    assert error["type"]


def test_a_huge_prompt_is_not_read_to_its_end(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    tokenizer = served.service._tokenizer
    real = tokenizer.encode

    def encode(text: str, special: bool = True) -> list[int]:
        read.append(len(text))
        return real(text, special)

    monkeypatch.setattr(tokenizer, "encode", encode)
    assert http.post(CHAT, json=said("ab " * 5000)).status_code == 400
    assert sum(read) <= 6 * served.service.context
    assert http.post(CHAT, json=said("ab " * 50000)).status_code == 400
    assert sum(read) <= 6 * served.service.context


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"messages": ', b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b'"x"', b"{} {}"]
)
def test_broken_json(body: bytes, http: httpx.Client) -> None:
    answer = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


def test_anthropics_errors_have_its_form(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json={"model": MODEL, "messages": [], "max_tokens": 5})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "messages" in answer.json()["error"]["message"]
    assert (
        http.post("/v1/messages", json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
        .json()["error"]["message"]
        .startswith("max_tokens:")
    )


PATHS = [
    CHAT, TEXT, "/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/models",
    "/v1/models/tiny", "/metrics", "/openapi.json", "/nowhere",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, "wrong", KEY + "x", "\u00e9"])
def test_every_route_but_health_needs_the_key(path: str, key: str | None, served: Served) -> None:
    given = {b"Authorization": f"Bearer {key}".encode(), b"x-api-key": str(key).encode()}
    headers: Mapping[bytes, bytes] = {} if key is None else given
    with client(served, None) as http:
        for answer in (http.get(path, headers=headers), http.post(path, json={}, headers=headers)):
            assert answer.status_code == 401
            assert KEY not in answer.text
            assert ("an API key is required" if key is None else "the API key is wrong") in answer.text
        assert http.get("/health", headers=headers).json() == {"status": "ok"}


def test_the_key_in_either_header(served: Served) -> None:
    with client(served, None) as http:
        assert http.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        assert http.get("/v1/models", headers={"Authorization": f"bearer {KEY}"}).status_code == 200
        both = {"Authorization": "Bearer of another", "x-api-key": KEY}  # as behind a proxy with a key of its own
        assert http.get("/v1/models", headers=both).status_code == 200


def test_other_sites_get_nothing(served: Served, http: httpx.Client) -> None:
    """Neither by a name that resolves to this server, nor by a form, nor by a script of another origin."""
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/health", headers={"Host": "evil.example:8080"}).status_code == 403
    assert http.post(CHAT, content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    answer = http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    preflight = http.options(CHAT, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in preflight.headers
    for name in ("localhost", "LOCALHOST:99", "192.168.1.7", "[::1]:8080"):
        assert http.get("/health", headers={"Host": name}).status_code == 200


def test_a_site_that_is_named_may_ask(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path, origins=["https://chat.example"]) as served, client(served) as http:
        good, bad = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
        assert http.get("/v1/models", headers=good).headers["access-control-allow-origin"] == "https://chat.example"
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=bad).headers


def test_paths_and_methods_that_are_not(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get(CHAT).status_code == 405
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


def test_bodies_that_are_too_large_or_never_end(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with tiny_server(tiny_pack("llama"), tmp_path, ServeLimits(body_bytes=1000)) as served, client(served) as http:
        assert http.post(CHAT, json=said("x" * 2000)).status_code == 413
        assert http.post(CHAT, content=(b"x" * 400 for _ in range(9)), headers={"Content-Type": "application/json"})
        chunk = b"fff\r\n" + b"x" * 4095 + b"\r\n"
        assert answered(served, "Transfer-Encoding: chunked", chunk).startswith(b"HTTP/1.1 413 ")
    with tiny_server(tiny_pack("llama"), tmp_path, ServeLimits(body_s=0.2)) as served:  # too short for the others
        assert answered(served, "Content-Length: 500", b"{").startswith(b"HTTP/1.1 408 ")


def answered(served: Served, length: str, body: bytes) -> bytes:
    """Return the beginning of the answer to a request whose header `length` promises more than `body`."""
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {KEY}\r\nContent-Type: application/json\r\n"
    with closing(socket.create_connection((host, int(port)))) as raw:
        raw.sendall(f"{head}{length}\r\n\r\n".encode() + body)
        return raw.recv(1000)


def test_a_body_that_finds_no_room_is_told_to_come_back(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with (
        tiny_server(tiny_pack("llama"), tmp_path, ServeLimits(bodies_bytes=1000, small_body_bytes=0)) as served,
        client(served) as http,
    ):
        answer = http.post(CHAT, json=said("x" * 2000))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        for _ in range(20):  # each leaves the room as it was
            assert http.post(CHAT, json=said("x" * 100)).status_code == 200


def test_every_answer_has_a_number(http: httpx.Client) -> None:
    numbers = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(numbers) == 3
