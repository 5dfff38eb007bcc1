"""Recorded requests of Codex and Claude Code: each is answered, and left-out tools are named."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.recorded import CLAUDE_CODE, CLAUDE_CODE_HEADERS, CODEX, CODEX_HEADERS, recorded
from tests.support.serving import MODEL, client, tiny_server
from tpi.pack.reader import Pack

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages?beta=true"
LEFT_OUT = "x-tpi-left-out-tools"


@pytest.fixture(scope="module")
def http(tiny_pack: Callable[..., Pack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with room for a coding agent's prompt."""
    folder = tmp_path_factory.mktemp("served")
    with tiny_server(tiny_pack("llama"), folder, context=8192) as served, client(served) as http:
        yield http


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("name", CODEX)
def test_codex_is_answered(name: str, http: httpx.Client) -> None:
    body = recorded(name, MODEL) | {"max_output_tokens": 6}  # Codex itself sets no limit
    answer = http.post(RESPONSES, json=body, headers=CODEX_HEADERS)
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert "response.output_item.done" in kinds
    whole = events[-1]["response"]
    assert whole["status"] in ("completed", "incomplete")
    assert whole["usage"]["output_tokens"] <= 6
    assert [tool["name"] for tool in whole["tools"]] == [
        tool["name"] for tool in body["tools"] if tool["type"] == "function"
    ]
    left_out = {tool["type"] for tool in body["tools"]} - {"function"}
    assert answer.headers[LEFT_OUT] == ", ".join(sorted(left_out))
    assert {"namespace", "web_search"} <= left_out


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_claude_code_is_answered(name: str, http: httpx.Client) -> None:
    body = recorded(name, MODEL) | {"max_tokens": 6}
    events = events_of(http.post(MESSAGES, json=body, headers=CLAUDE_CODE_HEADERS))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    counted = http.post("/v1/messages/count_tokens?beta=true", json=recorded("claude_code_count", MODEL))
    assert counted.status_code == 200
    assert counted.json()["input_tokens"] > 0


def test_more_tokens_than_the_context_has_are_no_error(http: httpx.Client) -> None:
    """Claude Code asks every model for 32,000 tokens."""
    body = recorded("claude_code_first", MODEL) | {"stop_sequences": [" ", "e", "a", "o"]}
    assert body["max_tokens"] == 32_000
    assert events_of(http.post(MESSAGES, json=body))[-1]["type"] == "message_stop"


def test_claude_codes_search_by_the_server_is_refused_by_name(http: httpx.Client) -> None:
    answer = http.post(MESSAGES, json=recorded("claude_code_search", MODEL))
    assert answer.status_code == 400
    assert "'web_search', which is left out" in answer.json()["error"]["message"]


def test_every_form_names_what_it_left_out(http: httpx.Client) -> None:
    said = [{"role": "user", "content": "Go"}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": said, "max_tokens": 2, "tools": [{"type": "custom"}]}, "custom"),
        (RESPONSES, {"input": "Go", "max_output_tokens": 2, "tools": [{"type": "local_shell"}]}, "local_shell"),
        (MESSAGES, {"messages": said, "max_tokens": 2, "tools": [{"type": "bash_20250124"}]}, "bash_20250124"),
    ]
    for path, body, kind in cases:
        for stream in (False, True):
            answer = http.post(path, json={"model": MODEL, "stream": stream, **body})
            assert answer.status_code == 200, answer.text
            assert answer.headers[LEFT_OUT] == kind
        assert LEFT_OUT not in http.post(path, json={"model": MODEL, **body, "tools": None}).headers
    counting = {"model": MODEL, "messages": said, "tools": [{"type": "bash_20250124"}]}
    assert http.post("/v1/messages/count_tokens", json=counting).headers[LEFT_OUT] == "bash_20250124"


def test_items_of_a_kept_response_are_referred_to_by_their_ids(http: httpx.Client) -> None:
    """The AI SDK sends ids in place of items if the server has stored them."""
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "required": ["x"]}
    tool = {"type": "function", "name": "look", "parameters": schema | {"additionalProperties": False}}
    asked: dict[str, Any] = {"input": "Go", "max_output_tokens": 90, "tools": [tool], "tool_choice": "required"}
    (call, *_) = http.post(RESPONSES, json=asked).json()["output"]
    assert call["type"] == "function_call"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    turns = [{"role": "user", "content": "Go"}, {"type": "item_reference", "id": call["id"]}, result]
    referred = http.post(RESPONSES, json={"input": turns, "max_output_tokens": 2, "temperature": 0, "tools": [tool]})
    assert referred.status_code == 200, referred.text
    turns[1] = call
    repeated = http.post(RESPONSES, json={"input": turns, "max_output_tokens": 2, "temperature": 0, "tools": [tool]})
    assert referred.json()["usage"]["input_tokens"] == repeated.json()["usage"]["input_tokens"]
    unkept = http.post(RESPONSES, json=asked | {"store": False}).json()["output"][0]["id"]
    turns[1] = {"type": "item_reference", "id": unkept}
    refused = http.post(RESPONSES, json={"input": turns})
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "input[1].id"
