"""Anthropic's own client against the server: messages, tools, streams, counts, errors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import validate

from tests.support.serving import KEY, MODEL, Served

if TYPE_CHECKING:
    from anthropic import Anthropic  # takes long to import, and every process of the tests collects this file

ASK: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
TOOL: Any = {"name": "look_up", "description": "Looks.", "input_schema": SCHEMA}


@pytest.fixture
def claude(served: Served) -> Iterator["Anthropic"]:
    from anthropic import Anthropic

    with Anthropic(base_url=served.url, api_key=KEY, max_retries=0, timeout=60) as claude:
        yield claude


def test_a_stream_says_what_the_whole_does(claude: "Anthropic") -> None:
    whole: Any = claude.messages.create(model=MODEL, messages=ASK, max_tokens=9, system="Be brief.", extra_body=GREEDY)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 9
    with claude.messages.stream(
        model=MODEL, messages=ASK, max_tokens=9, system="Be brief.", extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 9


def test_counting_tokens(claude: "Anthropic") -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.", tools=[TOOL])
    made = claude.messages.create(model=MODEL, messages=ASK, max_tokens=1, system="Be brief.", tools=[TOOL])
    cached = made.usage.cache_read_input_tokens
    assert counted.input_tokens == made.usage.input_tokens + (cached or 0)


def test_a_tool_is_used_and_its_result_gone_on_from(claude: "Anthropic") -> None:
    choice: Any = {"type": "tool", "name": "look_up"}
    used: Any = claude.messages.create(model=MODEL, messages=ASK, max_tokens=120, tools=[TOOL], tool_choice=choice)
    assert used.stop_reason == "tool_use"
    assert used.content[0].type == "tool_use"
    validate(used.content[0].input, SCHEMA)
    result: Any = {
        "type": "tool_result",
        "tool_use_id": used.content[0].id,
        "content": [{"type": "text", "text": "no"}],
    }
    turns: list[Any] = [*ASK, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
    second: Any = claude.messages.create(model=MODEL, messages=turns, max_tokens=2, tools=[TOOL])
    assert second.usage.output_tokens <= 2
    with claude.messages.stream(
        model=MODEL, messages=ASK, max_tokens=120, tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        streamed: Any = stream.get_final_message()
    validate(streamed.content[0].input, SCHEMA)


def test_stop_sequences_are_named(claude: "Anthropic") -> None:
    whole: Any = claude.messages.create(model=MODEL, messages=ASK, max_tokens=9, extra_body=GREEDY)
    stop = whole.content[0].text[1:3]
    cut: Any = claude.messages.create(model=MODEL, messages=ASK, max_tokens=9, extra_body=GREEDY, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert stop not in cut.content[0].text


def test_errors_are_the_clients_own(claude: "Anthropic", served: Served) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=ASK, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="over the context"):
        claude.messages.create(model=MODEL, messages=[{"role": "user", "content": "Hello " * 999}], max_tokens=5)
    stranger = claude.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, messages=ASK, max_tokens=5)
