"""Requests in the forms that clients usually send mean what clients expect; errors use the client's words."""

import logging
from typing import Any

import httpx
import pytest

from master.api.failures import failure_of
from master.api.openai.embeddings import EmbeddingForm
from master.text.templates.template import TemplateRefusal
from tests.support.serving import ALIAS, MODEL, Served, said
from tpi.errors import ModelError, NodeError, TpiError, UsageError

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_as_many_embeddings_as_at_openai(http: httpx.Client) -> None:
    assert len(EmbeddingForm.model_validate({"input": ["x"] * 2048}).input) == 2048
    answer = http.post(EMBEDDINGS, json={"input": [f"x {n}" for n in range(300)]})
    assert [one["index"] for one in answer.json()["data"]] == list(range(300))
    answer = http.post(EMBEDDINGS, json={"input": ["x"] * 2049})
    assert answer.json()["error"]["message"] == "input: list should have at most 2048 items, not 2049"


UNIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "too many prompts": (TEXT, {"prompt": ["a"] * 17}, "prompt: list should have at most 16 items, not 17"),
    "no prompts": (TEXT, {"prompt": []}, "prompt: list should have at least 1 item, not 0"),
    "ids and texts": (TEXT, {"prompt": [5, "a"]}, "prompt[1]: input should be a valid integer"),
    "ids in ids": (TEXT, {"prompt": [[5], ["a"]]}, "prompt[1][0]: input should be a valid integer"),
    "a number": (TEXT, {"prompt": 5}, "prompt: input should be a valid string or a valid list"),
    "a part": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text: input should be a valid string",
    ),
    "a choice": (
        CHAT,
        said(tool_choice={"type": "function", "function": {}}),
        "tool_choice.function.name: field required",
    ),
    "an item": (RESPONSES, {"input": [{"role": "king", "content": "x"}]}, "input[0].role: "),
    "a block": (
        MESSAGES,
        ASKED | {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text: input should be a valid string",
    ),
    "Anthropic's field": (MESSAGES, ASKED | {"top_k": -5}, "top_k: input should be"),
    "Anthropic's number": (MESSAGES, ASKED | {"messages": []}, "messages: list should have"),
}


@pytest.mark.parametrize("case", UNIONS)
def test_an_error_names_the_field_of_the_intended_branch_once(case: str, http: httpx.Client) -> None:
    path, body, expected = UNIONS[case]
    message = http.post(path, json=body).json()["error"]["message"]
    assert message.startswith(expected)
    assert message.count(expected.split(":")[0] + ":") == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_tool_whose_schema_is_no_grammar_is_named(path: str, http: httpx.Client) -> None:
    plain = {"type": "object", "properties": {}}
    tools: list[tuple[str, Any]] = [("good", plain), ("bad", UNIQUE)]
    if path == CHAT:
        made = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools]
        body = said(tools=made, tool_choice="required")
    elif path == RESPONSES:
        made = [{"type": "function", "name": name, "parameters": schema} for name, schema in tools]
        body = {"input": "x", "tools": made, "tool_choice": "required"}
    else:
        made = [{"name": name, "input_schema": schema} for name, schema in tools]
        body = ASKED | {"tools": made, "tool_choice": {"type": "any"}}
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    expected = "tools: the tool bad cannot be compiled to a grammar: the keyword uniqueItems is not supported"
    assert answer.json()["error"]["message"] == expected


def test_a_refused_schema_is_reported_without_grammar_text(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}
    message = http.post(CHAT, json=said(response_format=form)).json()["error"]["message"]
    field = "response_format.json_schema.schema"
    assert message == f"{field} cannot be compiled to a grammar: the keyword uniqueItems is not supported"


INSIDE = "/srv/models/secret"
ERRORS: list[TpiError] = [
    ModelError(f"{INSIDE} is damaged; use tpi run --raw"),
    NodeError("laptop", f"laptop lost {INSIDE}; leave it out of --workers"),
    UsageError("--temp is out of range; see tpi run --help"),
    TpiError(f"cannot write {INSIDE}"),
    TemplateRefusal(INSIDE, "no"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_the_server_stay_in_its_log(error: TpiError, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tpi.serve"):
        told = failure_of(error).message
    assert not any(part in told for part in (INSIDE, "tpi run", "--"))
    assert str(error) in caplog.text


def test_a_templates_refusal_does_not_reveal_the_servers_path(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **names: object) -> list[int]:
        raise TemplateRefusal(INSIDE, "roles must alternate")

    monkeypatch.setattr(served.service._tokenizer, "encode_chat", refused)
    error = http.post(CHAT, json=said()).json()["error"]
    assert error["message"] == "the model's chat template refused the conversation: roles must alternate"
    assert (error["param"], error["code"]) == ("messages", "template_refused")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, said(max_tokens=-1)),
        (CHAT, said(max_tokens=None, max_completion_tokens=-1)),
        (TEXT, {"prompt": "Hello", "max_tokens": -1, "temperature": 0}),
        (RESPONSES, {"input": "Hello", "max_output_tokens": -1, "temperature": 0}),
    ],
)
def test_a_limit_of_minus_one_is_as_many_as_there_is_room_for(
    path: str, body: dict[str, Any], served: Served, http: httpx.Client
) -> None:
    used = http.post(path, json=body | {"ignore_eos": True} if path != RESPONSES else body).json()["usage"]
    if path != RESPONSES:
        assert used["total_tokens"] == served.service.context
    else:
        assert used["output_tokens"] > 16


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_a_top_p_of_0_is_the_best_token(path: str, http: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": ASKED["messages"], "max_tokens": 12},
        TEXT: {"prompt": "Hello", "max_tokens": 12},
        RESPONSES: {"input": "Hello", "max_output_tokens": 12},
        MESSAGES: ASKED | {"max_tokens": 12},
    }
    texts = set()
    for own in ({"temperature": 0}, {"temperature": 1, "top_p": 0}, {"temperature": 1, "top_p": 0}):
        answer = http.post(path, json=bodies[path] | own)
        assert answer.status_code == 200
        found = answer.json()
        said_ = found["content"] if path == MESSAGES else found["output"] if path == RESPONSES else found["choices"]
        texts.add(str([{**one, "id": ""} for one in said_]))
    assert len(texts) == 1


def test_each_name_of_the_model_is_served(http: httpx.Client) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, ALIAS]
    assert http.get(f"/v1/models/{ALIAS}").json()["id"] == ALIAS
    for name in (MODEL, ALIAS):
        assert http.post(CHAT, json=said(model=name)).json()["model"] == name
        assert http.post(MESSAGES, json=ASKED | {"model": name}).json()["model"] == name
    assert http.post(CHAT, json=said()).json()["model"] == MODEL
    refused = http.post(CHAT, json=said(model="gpt-9"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1, 2]", "5", "null"])
def test_a_history_with_broken_arguments_is_gone_on_with(arguments: str, served: Served, http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "error"},
    ]
    assert http.post(CHAT, json={"messages": messages, "max_tokens": 4}).status_code == 200
    items = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "error"},
    ]
    assert http.post(RESPONSES, json={"input": items, "max_output_tokens": 4}).status_code == 200
