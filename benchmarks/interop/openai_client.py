"""OpenAI's own client for Python: chat completions, responses, embeddings."""

from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from benchmarks.interop.checks import ANSWER, CITY, LIMIT, SCHEMA, TEXT, WEATHER, Server, expect, refused, run, trip

ASK: list[Any] = [{"role": "user", "content": TEXT}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}


class Trip(BaseModel):
    """Structured output that the client asks for."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


def ai(server: Server) -> OpenAI:
    """Create a client that does not retry."""
    return OpenAI(base_url=server.api, api_key=server.key, max_retries=0, timeout=300)


def models(server: Server) -> None:
    """List the models, and get one by its name."""
    names = [one.id for one in ai(server).models.list()]
    expect(names == [server.model], names)
    expect(ai(server).models.retrieve(server.model).id == server.model, "models.retrieve")


def plain(server: Server) -> None:
    """Ask one question, and check the answer and the usage."""
    got = ai(server).chat.completions.create(model=server.model, messages=ASK, max_tokens=20, temperature=0)
    expect("Paris" in str(got.choices[0].message.content), got)
    expect(got.usage and got.usage.completion_tokens, "usage")


def stream(server: Server) -> None:
    """Ask the question in a stream with usage."""
    parts = ai(server).chat.completions.create(
        model=server.model, messages=ASK, max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(parts)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    expect("Paris" in text, text)
    expect(chunks[-1].usage, "usage")


def tools(server: Server) -> None:
    """Have the model call a tool, and continue from its result; once as one piece, once as a stream."""
    turns: list[Any] = [{"role": "user", "content": WEATHER}]
    asked: Any = {"model": server.model, "tools": [TOOL], "max_tokens": LIMIT, "temperature": 0}
    first = ai(server).chat.completions.create(messages=turns, tool_choice="required", **asked).choices[0]
    calls: Any = first.message.tool_calls or []
    expect(calls and first.finish_reason == "tool_calls", first)
    turns += [first.message, *({"role": "tool", "tool_call_id": one.id, "content": ANSWER} for one in calls)]
    second = ai(server).chat.completions.create(messages=turns, tool_choice="none", **asked)
    expect(second.choices[0].message.content, second)
    with ai(server).chat.completions.stream(messages=turns[:1], tool_choice="required", **asked) as events:
        final = events.get_final_completion().choices[0].message
    expect(final.tool_calls and final.tool_calls[0].function.name == "weather", final)


def schema(server: Server) -> None:
    """Get an answer parsed into a class (the client makes a strict schema of it), and one to a plain schema."""
    got = ai(server).chat.completions.parse(
        model=server.model, messages=ASK, response_format=Trip, max_tokens=LIMIT, temperature=0
    )
    expect(isinstance(got.choices[0].message.parsed, Trip), got)
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    raw = ai(server).chat.completions.create(
        model=server.model, messages=ASK, response_format=form, max_tokens=LIMIT, temperature=0
    )
    trip(str(raw.choices[0].message.content))


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused."""
    chat = ai(server).chat.completions
    refused(
        openai.BadRequestError,
        lambda: chat.create(model=server.model, messages=ASK, temperature=9),
        "temperature",
    )
    refused(openai.NotFoundError, lambda: chat.create(model="gpt-9", messages=ASK), "gpt-9")
    refused(openai.AuthenticationError, lambda: ai(server).with_options(api_key="wrong").models.list(), "key")


def embeddings(server: Server) -> None:
    """Make vectors of two texts."""
    got = ai(server).embeddings.create(model=server.model, input=["one", "two"])
    expect(len(got.data) == 2 and len(got.data[0].embedding) > 100, got.usage)


def responses(server: Server) -> None:
    """Try the Responses API: plain, streamed, a tool and its result, a class, and a response that continues another."""
    made = ai(server).responses
    asked: Any = {"model": server.model, "max_output_tokens": LIMIT, "temperature": 0}
    first = made.create(input=TEXT, **asked)
    expect("Paris" in first.output_text, first)
    expect(made.create(input="And of Spain?", previous_response_id=first.id, **asked).output_text, "a further turn")
    with made.stream(input=TEXT, **asked) as events:
        expect("Paris" in events.get_final_response().output_text, "a stream")
    tool: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True, "description": "Weather."}
    search: Any = {"type": "web_search"}
    called: Any = made.create(input=WEATHER, tools=[search, tool], tool_choice="required", **asked)
    call = next(item for item in called.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": ANSWER}
    turns: Any = [{"role": "user", "content": WEATHER}, *called.output, result]
    expect(made.create(input=turns, tools=[tool], tool_choice="none", **asked).output_text, "after a tool")
    parsed = made.parse(input=TEXT, text_format=Trip, **asked)
    expect(isinstance(parsed.output_parsed, Trip), parsed)


if __name__ == "__main__":
    run({
        "models": models, "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error,
        "embeddings": embeddings, "responses": responses,
    })  # fmt: skip
