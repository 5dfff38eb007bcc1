"""litellm, which speaks to servers of OpenAI's and Anthropic's forms."""

from functools import partial
from typing import Any

import litellm

from benchmarks.interop.checks import ANSWER, CITY, LIMIT, SCHEMA, TEXT, WEATHER, Server, expect, refused, run, trip

litellm.telemetry = False
ASK: list[Any] = [{"role": "user", "content": TEXT}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}


def asked(server: Server, provider: str = "openai", **more: Any) -> Any:
    """Request one completion."""
    base = server.api if provider == "openai" else server.url
    limits = {"max_tokens": LIMIT, "temperature": 0, "timeout": 300, "num_retries": 0}
    where = {"model": f"{provider}/{server.model}", "api_base": base, "api_key": server.key}
    return litellm.completion(**{"messages": ASK, **limits, **where, **more})


def models(server: Server) -> None:
    """List the models."""
    names = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=server.api, api_key=server.key
    )
    expect(names == [server.model], names)


def plain(server: Server) -> None:
    """Ask one question in each form and check the answers."""
    for provider in ("openai", "anthropic"):
        expect("Paris" in asked(server, provider).choices[0].message.content, provider)


def stream(server: Server) -> None:
    """Ask the question in a stream, in each form."""
    for provider in ("openai", "anthropic"):
        chunks = list(asked(server, provider, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        expect("Paris" in text, (provider, text))


def tools(server: Server) -> None:
    """Have the model call a tool, and continue from its result, in each form."""
    for provider in ("openai", "anthropic"):
        turns: list[Any] = [{"role": "user", "content": WEATHER}]
        first = asked(server, provider, messages=turns, tools=[TOOL], tool_choice="required").choices[0].message
        expect(first.tool_calls and first.tool_calls[0].function.name == "weather", (provider, first))
        results = [{"role": "tool", "tool_call_id": one.id, "content": ANSWER} for one in first.tool_calls]
        second = asked(server, provider, messages=[*turns, first, *results], tools=[TOOL], tool_choice="none")
        expect(second.choices[0].message.content, (provider, second))


def schema(server: Server) -> None:
    """Ask for JSON of a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    trip(asked(server, response_format=form).choices[0].message.content)


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused, in each form."""
    for provider in ("openai", "anthropic"):
        ask = partial(asked, server, provider)
        refused(litellm.BadRequestError, partial(ask, temperature=9), "temperature")
        refused(litellm.AuthenticationError, partial(ask, api_key="wrong"), "key")
        refused(litellm.NotFoundError, partial(ask, model=f"{provider}/gpt-9"), "gpt-9")


def embeddings(server: Server) -> None:
    """Make vectors of two texts."""
    got = litellm.embedding(f"openai/{server.model}", ["one", "two"], api_base=server.api, api_key=server.key)
    expect(len(got.data) == 2 and len(got.data[0]["embedding"]) > 100, got.usage)


def responses(server: Server) -> None:
    """Ask with the Responses API, as one piece and as a stream."""
    where: Any = {"model": f"openai/{server.model}", "api_base": server.api, "api_key": server.key, "temperature": 0}
    got: Any = litellm.responses(input=TEXT, max_output_tokens=20, **where)
    expect("Paris" in str(got.output), got)
    events: Any = litellm.responses(input=TEXT, max_output_tokens=20, stream=True, **where)
    expect(any(event.type == "response.completed" for event in events), "a stream")


if __name__ == "__main__":
    run({
        "models": models, "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error,
        "embeddings": embeddings, "responses": responses,
    })  # fmt: skip
