"""Anthropic's own client for Python."""

from typing import Any

import anthropic
from anthropic import Anthropic
from pydantic import BaseModel

from benchmarks.interop.checks import ANSWER, CITY, LIMIT, TEXT, WEATHER, Server, expect, refused, run

ASK: list[Any] = [{"role": "user", "content": TEXT}]
TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": CITY}
GREEDY = {"temperature": 0}  # the newest version has no such argument


class Trip(BaseModel):
    """Structured output that the client asks for, without bounds: the client would drop them from its schema."""

    city: str
    days: int


def claude(server: Server) -> Anthropic:
    """Create a client that does not retry."""
    return Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=300)


def models(server: Server) -> None:
    """List the models, and get one by its name."""
    names = [one.id for one in claude(server).models.list()]
    expect(names == [server.model], names)
    expect(claude(server).models.retrieve(server.model).id == server.model, "models.retrieve")


def plain(server: Server) -> None:
    """Ask one question, check the answer, and count the tokens of the question."""
    got: Any = claude(server).messages.create(model=server.model, messages=ASK, max_tokens=20, extra_body=GREEDY)
    expect("Paris" in got.content[0].text, got)
    expect(claude(server).messages.count_tokens(model=server.model, messages=ASK).input_tokens > 10, "count_tokens")


def stream(server: Server) -> None:
    """Ask the question in a stream, and check the text and the usage."""
    with claude(server).messages.stream(model=server.model, messages=ASK, max_tokens=20, extra_body=GREEDY) as events:
        expect("Paris" in "".join(events.text_stream), "the text")
        expect(events.get_final_message().usage.output_tokens, "usage")


def tools(server: Server) -> None:
    """Have the model call one of two tools (the server leaves out the other), and continue.

    Do so once without a stream, and once with a stream.
    """
    turns: list[Any] = [{"role": "user", "content": WEATHER}]
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    asked: Any = {"model": server.model, "max_tokens": LIMIT, "tools": [search, TOOL], "extra_body": GREEDY}
    first: Any = claude(server).messages.create(messages=turns, tool_choice={"type": "any"}, **asked)
    used = [block for block in first.content if block.type == "tool_use"]
    expect(used and first.stop_reason == "tool_use", first)
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": ANSWER} for one in used]
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second: Any = claude(server).messages.create(messages=turns, tool_choice={"type": "none"}, **asked)
    expect(second.content[0].text, second)
    with claude(server).messages.stream(messages=turns[:1], tool_choice={"type": "any"}, **asked) as events:
        final: Any = events.get_final_message()
    expect(final.content[-1].name == "weather", final)


def schema(server: Server) -> None:
    """Get an answer parsed into a class."""
    got: Any = claude(server).messages.parse(
        model=server.model, messages=ASK, max_tokens=LIMIT, output_format=Trip, extra_body=GREEDY
    )
    expect(isinstance(got.parsed_output, Trip), got)


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused."""
    made = claude(server).messages
    bad = {"temperature": 9}
    refused(
        anthropic.BadRequestError,
        lambda: made.create(model=server.model, messages=ASK, max_tokens=5, extra_body=bad),
        "temperature",
    )
    refused(anthropic.NotFoundError, lambda: made.create(model="claude-9", messages=ASK, max_tokens=5), "claude-9")
    wrong = claude(server).with_options(api_key="wrong").messages
    refused(
        anthropic.AuthenticationError,
        lambda: wrong.create(model=server.model, messages=ASK, max_tokens=5),
        "key",
    )


if __name__ == "__main__":
    run({"models": models, "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error})
