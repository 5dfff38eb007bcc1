"""pydantic-ai: agents by chat completions, by responses and by Anthropic's form."""

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from benchmarks.interop.checks import ANSWER, LIMIT, TEXT, WEATHER, Server, expect, refused, run


class Trip(BaseModel):
    """Structured output that the client asks for."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


SETTINGS = ModelSettings(max_tokens=LIMIT, temperature=0, timeout=300)


def chat(server: Server, key: str = "", name: str = "") -> Model[Any]:
    """Create a model that uses chat completions."""
    return OpenAIChatModel(
        name or server.model, provider=OpenAIProvider(base_url=server.api, api_key=key or server.key)
    )


def anthropic(server: Server) -> Model[Any]:
    """Create a model that uses the Anthropic Messages API."""
    return AnthropicModel(server.model, provider=AnthropicProvider(base_url=server.url, api_key=server.key))


def responses_model(server: Server) -> Model[Any]:
    """Create a model that uses the Responses API."""
    return OpenAIResponsesModel(server.model, provider=OpenAIProvider(base_url=server.api, api_key=server.key))


def forms(server: Server) -> Iterator[Model[Any]]:
    """Yield a model that uses chat completions, and one that uses the Anthropic Messages API."""
    yield chat(server)
    yield anthropic(server)


def _plain(model: Model[Any]) -> None:
    got = Agent(model, instructions="Be brief.", model_settings=SETTINGS).run_sync(TEXT)
    expect("Paris" in got.output, got.output)


def plain(server: Server) -> None:
    """Ask one question, in each form."""
    for model in forms(server):
        _plain(model)


async def _streamed(model: Model[Any]) -> None:
    async with Agent(model, model_settings=SETTINGS).run_stream(TEXT) as got:
        parts = [part async for part in got.stream_text(delta=True)]
    expect("Paris" in "".join(parts), parts)


def stream(server: Server) -> None:
    """Ask the question in a stream, in each form."""
    for model in forms(server):
        asyncio.run(_streamed(model))


def _tools(model: Model[Any]) -> None:
    """Have the model call a tool, which is offered once, and then the tool that returns the output.

    Each step of the model must call a tool.
    """
    called: list[str] = []
    agent = Agent(model, output_type=ToolOutput(Trip), model_settings=SETTINGS)

    async def once(context: RunContext[None], tool: ToolDefinition) -> ToolDefinition | None:
        return None if called else tool

    @agent.tool_plain(prepare=once)  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return ANSWER

    got = agent.run_sync(WEATHER)
    expect(isinstance(got.output, Trip) and called, got.output)


def tools(server: Server) -> None:
    """Get an answer parsed into a class by tool calls, while another tool is offered too, in each API."""
    for model in forms(server):
        _tools(model)


def schema(server: Server) -> None:
    """Get an answer parsed into a class, by a schema."""
    got = Agent(chat(server), output_type=NativeOutput(Trip), model_settings=SETTINGS).run_sync(TEXT)
    expect(isinstance(got.output, Trip), got.output)


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused."""
    hot = ModelSettings(temperature=9)
    refused(ModelHTTPError, lambda: Agent(chat(server)).run_sync(TEXT, model_settings=hot), "400", "temperature")
    refused(ModelHTTPError, lambda: Agent(chat(server, name="gpt-9")).run_sync(TEXT), "404", "gpt-9")
    refused(ModelHTTPError, lambda: Agent(chat(server, key="wrong")).run_sync(TEXT), "401", "key")


def responses(server: Server) -> None:
    """Ask with the Responses API: plain, streamed, with a tool, as a class."""
    model = responses_model(server)
    _plain(model)
    asyncio.run(_streamed(model))
    _tools(model)
    got = Agent(model, output_type=NativeOutput(Trip), model_settings=SETTINGS).run_sync(TEXT)
    expect(isinstance(got.output, Trip), got.output)


if __name__ == "__main__":
    run({
        "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error, "responses": responses,
    })  # fmt: skip
