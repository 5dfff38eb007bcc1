"""OpenAI's own client with the server: every API, with and without streaming. A tiny model's text makes no sense."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import validate

from master.text.spelling import written
from tests.support.serving import ALIAS, KEY, MODEL, Served

if TYPE_CHECKING:
    from openai import OpenAI  # takes long to import, and every process of the tests collects this file

ASK: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look_up", "description": "Looks.", "parameters": SCHEMA}}


@pytest.fixture
def ai(served: Served) -> Iterator["OpenAI"]:
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60) as ai:
        yield ai


def test_a_stream_says_what_the_whole_does(ai: "OpenAI") -> None:
    whole = ai.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12)
    stream = ai.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    used, whole_used = chunks[-1].usage, whole.usage
    assert used
    assert whole_used
    assert (used.completion_tokens, used.prompt_tokens) == (whole_used.completion_tokens, whole_used.prompt_tokens)
    assert used.completion_tokens == 12
    assert used.prompt_tokens_details
    assert used.prompt_tokens_details.cached_tokens == used.prompt_tokens // 32 * 32
    extra = whole.model_extra
    assert extra
    assert extra["timings"]["predicted_n"] == 12


def test_a_further_turn_computes_only_what_is_new(ai: "OpenAI") -> None:
    """Ask at a high temperature, so that the answer's text, encoded again, may have other tokens than were drawn."""
    for seed in range(3):
        first = ai.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, temperature=1.5, seed=seed)
        said: Any = {"role": "assistant", "content": first.choices[0].message.content}
        turns = [*ASK, said, {"role": "user", "content": "?"}]
        second = ai.chat.completions.create(model=MODEL, messages=turns, max_tokens=1)
        assert first.usage
        assert second.usage
        assert second.usage.prompt_tokens_details
        computed = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == computed


def test_seeds_choices_and_stops(ai: "OpenAI") -> None:
    def ask(**more: Any) -> list[str | None]:
        answer = ai.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, temperature=1.5, **more)
        return [choice.message.content for choice in answer.choices]

    assert ask(seed=5, n=3) == ask(seed=5, n=3)
    assert len(set(ask(seed=5, n=3))) > 1
    assert ask(seed=5) == ask(seed=5, n=2)[:1]
    text = ask(seed=6)[0]
    assert text
    assert len(text) > 3
    assert ask(seed=6, stop=text[1:3]) == [text[: text.index(text[1:3])]]
    chunks = ai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, temperature=1.5, seed=5, n=3, stream=True
    )
    said = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == ask(seed=5, n=3)


def test_logprobs_are_those_of_the_tokens(ai: "OpenAI", served: Served) -> None:
    vocabulary = set(map(served.service._tokenizer.raw, range(served.service._vocab)))
    answer = ai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    said = answer.choices[0].logprobs
    assert said
    assert said.content
    assert len(said.content) == 6
    for token in said.content:
        assert token.logprob == max(best.logprob for best in token.top_logprobs)  # greedy
        assert [best.logprob for best in token.top_logprobs] == sorted(b.logprob for b in token.top_logprobs)[::-1]
        assert written(bytes(token.bytes or [])) == token.token
        assert bytes(token.bytes or []) in vocabulary
    streamed = ai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token.logprob for part in parts if part and part.content for token in part.content] == [
        token.logprob for token in said.content
    ]


def test_a_bias_decides(ai: "OpenAI") -> None:
    answer = ai.completions.create(model=MODEL, prompt="Hello", max_tokens=3, logit_bias={"70": 100}, logprobs=1)
    assert answer.choices[0].logprobs
    assert len(set(answer.choices[0].logprobs.tokens or [])) == 1


def test_completions_of_texts_and_ids(ai: "OpenAI") -> None:
    several = ai.completions.create(model=MODEL, prompt=["Hello", "you"], max_tokens=5, temperature=0, echo=True)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text.startswith("Hello")
    one = ai.completions.create(model=MODEL, prompt=[70, 71, 72], max_tokens=5, temperature=0)
    stream = ai.completions.create(model=MODEL, prompt=[70, 71, 72], max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == one.choices[0].text
    assert one.usage
    assert one.usage.prompt_tokens == 3


def test_a_forced_tool_is_called_and_its_answer_gone_on_from(ai: "OpenAI") -> None:
    turns: list[Any] = list(ASK)
    answer = ai.chat.completions.create(
        model=MODEL, messages=turns, tools=[TOOL], tool_choice="required", max_tokens=120, parallel_tool_calls=False
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert call.function.name == "look_up"
    validate(json.loads(call.function.arguments), SCHEMA)
    turns += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "nothing"},
    ]
    second = ai.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL], max_tokens=3, tool_choice="auto")
    assert second.usage
    assert answer.usage
    assert second.usage.prompt_tokens_details
    # the very tokens of the call are replayed; the last of them, the end of turn, was computed only if it was drafted
    known = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens in (known - 1, known)


def test_a_streamed_tool_call(ai: "OpenAI") -> None:
    choice: Any = {"type": "function", "function": {"name": "look_up"}}
    chunks = list(
        ai.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, max_tokens=120, stream=True
        )
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == [0]
    assert calls[0].function
    validate(json.loads(calls[0].function.arguments or ""), SCHEMA)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_a_schema_an_object_a_pattern(stream: bool, ai: "OpenAI") -> None:
    forms: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        {"type": "json_object"},
        {"type": "regex", "pattern": "[a-c]{3}-\\d/\\d"},
    ]
    texts = []
    for form in forms:
        limit = 100 if form["type"] != "json_object" else 200
        got: Any = ai.chat.completions.create(
            model=MODEL, messages=ASK, response_format=form, max_tokens=limit, seed=1, stream=stream,
        )  # fmt: skip
        texts.append(
            "".join(chunk.choices[0].delta.content or "" for chunk in got)
            if stream
            else str(got.choices[0].message.content)
        )
    validate(json.loads(texts[0]), SCHEMA)
    assert texts[1].lstrip().startswith("{")
    assert len(texts[2]) == 7


def test_embeddings_have_length_1(ai: "OpenAI") -> None:
    several = ai.embeddings.create(model=MODEL, input=["Hello", "Hello you"])
    plain = ai.embeddings.create(model=MODEL, input="Hello", encoding_format="float")
    vectors = [item.embedding for item in several.data]
    assert [round(sum(value * value for value in vector), 4) for vector in vectors] == [1.0, 1.0]
    assert vectors[0] != vectors[1]
    assert max(abs(a - b) for a, b in zip(vectors[0], plain.data[0].embedding, strict=True)) < 1e-5


def test_responses(ai: "OpenAI") -> None:
    first = ai.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=8)
    assert first.status == "incomplete"
    assert first.output_text
    assert first.usage
    assert first.usage.output_tokens == 8
    second = ai.responses.create(
        model=MODEL, input="And?", previous_response_id=first.id, temperature=0, max_output_tokens=2
    )
    assert second.usage
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    stream = ai.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=8, stream=True)
    events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == first.output_text


def test_responses_with_tools_and_schemas(ai: "OpenAI") -> None:
    tool: Any = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}
    first = ai.responses.create(
        model=MODEL,
        input="Hello",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=120,
        parallel_tool_calls=False,
    )
    call: Any = first.output[0]
    assert call.type == "function_call"
    validate(json.loads(call.arguments), SCHEMA)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "nothing"}]
    second = ai.responses.create(model=MODEL, input=result, previous_response_id=first.id, max_output_tokens=2)
    assert second.output_text is not None
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    third = ai.responses.create(model=MODEL, input="Hello", text=form, max_output_tokens=100)
    validate(json.loads(third.output_text), SCHEMA)


def test_errors_are_the_clients_own(ai: "OpenAI") -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello " * 999}])
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "messages"
    with pytest.raises(openai.AuthenticationError):
        ai.with_options(api_key="wrong").models.list()
    assert [model.id for model in ai.models.list().data] == [MODEL, ALIAS]
