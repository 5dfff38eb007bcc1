"""The last message of the assistant is continued. Fields that change the prompt do so, or are refused by name."""

from typing import Any

import httpx
import pytest

from tests.support.serving import MODEL, Served, said

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, Any] = {"role": "user", "content": "Hello"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "Once upon"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}}
FORM: dict[str, Any] = {"type": "json_object", "schema": SCHEMA | {"required": ["x"]}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def prompt_of(served: Served, text: str) -> int:
    """Return the number of tokens of a prompt that ends with the unfinished answer."""
    tokenizer = served.service._tokenizer
    opened = tokenizer.render([ASKED])
    return len(tokenizer.encode(opened + text, special=False))


def test_a_prefix_is_gone_on_with_in_each_form(served: Served, http: httpx.Client) -> None:
    body = {"max_tokens": 6, "temperature": 0, "messages": [ASKED, BEGUN]}
    expected = prompt_of(served, "Once upon")
    chat = http.post(CHAT, json=body | {"continue_final_message": True}).json()
    prefixed = http.post(CHAT, json=body | {"messages": [ASKED, BEGUN | {"prefix": True}]}).json()
    both = http.post(CHAT, json=body | {"continue_final_message": True, "add_generation_prompt": False}).json()
    claude = http.post(MESSAGES, json=body | {"model": MODEL}).json()
    blocks = [{"type": "text", "text": "Once upon"}]
    in_blocks = http.post(
        MESSAGES, json=body | {"model": MODEL, "messages": [ASKED, BEGUN | {"content": blocks}]}
    ).json()
    texts = [one["choices"][0]["message"]["content"] for one in (chat, prefixed, both)]
    assert {*texts, claude["content"][0]["text"], in_blocks["content"][0]["text"]} == {texts[0]}
    assert {one["usage"]["prompt_tokens"] for one in (chat, prefixed, both)} == {expected}
    used = claude["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == expected
    counted = http.post(f"{MESSAGES}/count_tokens", json={"model": MODEL, "messages": [ASKED, BEGUN]}).json()
    assert counted["input_tokens"] == expected
    ended = http.post(CHAT, json=body).json()  # as OpenAI: a new turn
    assert ended["usage"]["prompt_tokens"] > expected


def test_the_opening_of_a_turn_can_be_left_out(http: httpx.Client) -> None:
    counts = [
        http.post(CHAT, json=said(add_generation_prompt=given)).json()["usage"]["prompt_tokens"]
        for given in (None, True, False)
    ]
    assert counts[0] == counts[1] > counts[2]


CALLED: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a question that is continued": (
        CHAT,
        {"messages": [ASKED], "continue_final_message": True},
        "continue_final_message",
    ),
    "a prefix in the middle": (CHAT, {"messages": [BEGUN | {"prefix": True}, ASKED]}, "messages"),
    "a continued message and a new turn": (
        CHAT,
        {"messages": [ASKED, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    "a continued message and a form": (
        CHAT,
        {"messages": [ASKED, BEGUN], "continue_final_message": True, "response_format": FORM},
        "continue_final_message",
    ),
    "a prefix and a tool that has to be called": (
        CHAT,
        {"messages": [ASKED, BEGUN | {"prefix": True}], "tools": [TOOL], "tool_choice": "required"},
        "messages[1].prefix",
    ),
    "an effort that no template reads": (CHAT, said(reasoning_effort="high"), "reasoning_effort"),
    "a name that no template reads": (CHAT, said(chat_template_kwargs={"foo": 1}), "chat_template_kwargs.foo"),
    "a schema of a text": (
        RESPONSES,
        {"input": "x", "text": {"format": {"type": "text", "schema": SCHEMA}}},
        "text.format.schema",
    ),
    "a use of a tool without its result": (
        MESSAGES,
        {"model": MODEL, "max_tokens": 5, "messages": [ASKED, {"role": "assistant", "content": [CALLED]}]},
        "messages[1]",
    ),
    "a response in the background": (RESPONSES, {"input": "x", "background": True}, "background"),
    "a response that is cut": (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
    "a suffix": ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    "the best of several": ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
    "functions": (CHAT, said(functions=[{"name": "f"}]), "functions"),
    "a call of a function": (CHAT, said(function_call={"name": "f"}), "function_call"),
    "a field of a part": (
        CHAT,
        said(stream_options={"include_obfuscation": True}),
        "stream_options.include_obfuscation",
    ),
    "two limits": (CHAT, {"messages": [ASKED], "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    "two penalties": (CHAT, said(repeat_penalty=1.1, repetition_penalty=1.2), "repetition_penalty"),
    "the name of a tool that need not be called": (
        MESSAGES,
        {"model": MODEL, "max_tokens": 5, "messages": [ASKED], "tool_choice": {"type": "auto", "name": "f"}},
        "tool_choice.name",
    ),
    "a field that nobody knows": (CHAT, said(tempreature=1), "tempreature"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(case: str, http: httpx.Client) -> None:
    path, body, field = REFUSED[case]
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{field}: ")
    assert error.get("param", field) == field


def test_a_model_that_does_not_think_takes_no_effort(http: httpx.Client) -> None:
    assert http.post(CHAT, json=said(reasoning_effort="none")).status_code == 200
    answer = http.post(RESPONSES, json={"input": "x", "max_output_tokens": 2, "reasoning": {"effort": "high"}})
    assert answer.json()["reasoning"] == {"effort": None, "summary": None}


LEFT_OUT: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"thinking": {"type": "disabled"}}, None),
    ({"thinking": {"type": "adaptive"}}, "thinking"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "enabled"}}, "output_config.effort, thinking"),
]


@pytest.mark.parametrize("case", range(len(LEFT_OUT)))
def test_messages_say_which_thinking_is_left_out(case: int, http: httpx.Client) -> None:
    more, left_out = LEFT_OUT[case]
    body = {"model": MODEL, "max_tokens": 2, "messages": [ASKED], **more}
    answer = http.post(MESSAGES, json=body)
    assert (answer.status_code, answer.headers.get("X-TPI-Left-Out-Fields")) == (200, left_out)
    claude = {"model": MODEL, "max_tokens": 2, "messages": [ASKED], "thinking": {"type": "disabled"}}
    assert http.post(MESSAGES, json=claude).status_code == 200


def test_forms_of_answers_that_only_some_clients_know(http: httpx.Client) -> None:
    kept = [f'{{"x": {digit}}}' for digit in range(10)]
    chat = http.post(CHAT, json=said(response_format=FORM, max_tokens=60)).json()
    assert chat["choices"][0]["message"]["content"] in kept
    output = {"format": {"type": "json_schema", "schema": FORM["schema"]}}
    body = {"model": MODEL, "max_tokens": 60, "messages": [ASKED], "output_config": output}
    assert http.post(MESSAGES, json=body).json()["content"][0]["text"] in kept


def test_parts_of_other_forms_are_part_of_the_prompt(http: httpx.Client) -> None:
    """A refusal, a failed tool and examples of input each make the prompt longer."""

    def tokens(**more: Any) -> int:
        body = {"model": MODEL, "messages": [ASKED], **more}
        return int(http.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"])

    tool = {"name": "look", "input_schema": SCHEMA}
    assert tokens(tools=[tool]) < tokens(tools=[tool | {"input_examples": [{"x": 7}]}])
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "No."}]}
    turns = [[ASKED, {"role": "assistant", "content": [CALLED]}, {"role": "user", "content": [one]}]
             for one in (result, result | {"is_error": True})]  # fmt: skip
    assert tokens(messages=turns[0]) < tokens(messages=turns[1])
    refusal = [{"role": "assistant", "content": None, "refusal": "No, I will not."}, ASKED]
    used = [http.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
            for messages in ([ASKED], refusal)]  # fmt: skip
    assert used[0] + 6 < used[1]
