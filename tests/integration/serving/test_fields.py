"""Fields of a request are used or refused by name; no field is accepted and ignored."""

from typing import Any

import httpx
import pytest

from tests.support.serving import KEY, MODEL, Served, said

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ITEM_TOOL: dict[str, Any] = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
SPOKEN: dict[str, Any] = {"input": "Hello", "temperature": 0, "max_output_tokens": 6}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_ids_is_echoed_as_its_text(stream: bool, served: Served) -> None:
    from openai import OpenAI

    ids = served.service._tokenizer.encode("Hello you")
    with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60) as ai:
        plain = ai.completions.create(model=MODEL, prompt=[ids], max_tokens=5, temperature=0)
        got: Any = ai.completions.create(
            model=MODEL, prompt=[ids], max_tokens=5, temperature=0, echo=True, stream=stream
        )
        text = "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text
    assert text == f"Hello you{plain.choices[0].text}"


def test_logprobs_of_a_prompt_are_refused_by_name(http: httpx.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "Hello", "echo": True, "logprobs": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "echo"


def test_offsets_of_completions_are_where_tokens_are_in_the_text(http: httpx.Client) -> None:
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 1.5, "seed": 3, "logprobs": 2}
    choice = http.post(TEXT, json=body).json()["choices"][0]
    found = choice["logprobs"]
    assert len(found["tokens"]) == 12
    for token, at, best in zip(found["tokens"], found["text_offset"], found["top_logprobs"], strict=True):
        assert token in best
        if not token.startswith("bytes:"):
            assert choice["text"][at : at + len(token)] == token
    with http.stream("POST", TEXT, json=body | {"stream": True}) as streamed:
        assert f'"text_offset":[{found["text_offset"][-1]}' in streamed.read().decode()


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_responses_have_the_logprobs_that_are_asked_for(asked: dict[str, Any], served: Served) -> None:
    from openai import OpenAI

    best = asked.get("top_logprobs", 0)
    with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60) as ai:
        whole: Any = ai.responses.create(model=MODEL, **SPOKEN, **asked)
        events: list[Any] = list(ai.responses.create(model=MODEL, **SPOKEN, **asked, stream=True))
    tokens = whole.output[0].content[0].logprobs
    assert len(tokens) == 6
    assert b"".join(bytes(one.bytes) for one in tokens).decode(errors="replace") == whole.output_text
    assert {len(one.top_logprobs) for one in tokens} == {best}
    assert whole.top_logprobs == best
    deltas = [one.logprob for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [one.logprob for one in done.logprobs] == pytest.approx([one.logprob for one in tokens], abs=1e-3)
    assert deltas == [one.logprob for one in done.logprobs][: len(deltas)]
    assert deltas


def test_responses_without_them_have_none(http: httpx.Client) -> None:
    asked = {"include": ["reasoning.encrypted_content"]}
    assert http.post(RESPONSES, json=SPOKEN | asked).json()["output"][0]["content"][0]["logprobs"] == []


def test_a_response_repeats_what_was_asked(http: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    choice = {"type": "function", "name": "look"}
    body = {"input": "Hello", "max_output_tokens": 60, "text": {"format": form}}
    answer = http.post(RESPONSES, json=body).json()
    assert answer["text"] == {"format": form}
    assert answer["tool_choice"] == "auto"
    answer = http.post(RESPONSES, json=body | {"text": None, "tools": [ITEM_TOOL], "tool_choice": choice}).json()
    assert answer["tool_choice"] == choice
    assert answer["text"] == {"format": {"type": "text"}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "something unknown to include": (RESPONSES, {"input": "x", "include": ["everything"]}, "include[0]"),
    "too many logprobs": (RESPONSES, {"input": "x", "top_logprobs": 50}, "top_logprobs"),
    "a strict tool of a broken schema": (
        CHAT,
        said(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 5}, "strict": True}}]),
        "tools",
    ),
    "a broken schema beside tools": (
        CHAT,
        said(tools=[TOOL], response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
        "response_format.json_schema.schema",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(case: str, http: httpx.Client) -> None:
    path, body, field = REFUSED[case]
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_choice_of_a_tool_without_its_name_is_refused(http: httpx.Client) -> None:
    tool = {"name": "look", "input_schema": SCHEMA}
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    answer = http.post(MESSAGES, json=body | {"tool_choice": {"type": "tool"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("tool_choice.name: ")
    strict = http.post(MESSAGES, json=body | {"tools": [tool | {"strict": True, "input_schema": {"type": 5}}]})
    assert strict.status_code == 400  # its schema is made a grammar


@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto", "parallel_tool_calls": False}])
def test_a_form_beside_tools_is_kept_or_a_tool_is_called(more: dict[str, Any], http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(4):
        body = said(tools=[TOOL], response_format=form, max_tokens=100, temperature=1.2, seed=seed, **more)
        (choice,) = http.post(CHAT, json=body).json()["choices"]
        calls = choice["message"].get("tool_calls")
        written = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        assert written in [f'{{"x": {digit}}}' for digit in range(10)]
