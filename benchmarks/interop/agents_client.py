"""openai-agents: its default model uses the Responses API; another model uses chat completions."""

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from benchmarks.interop.checks import ANSWER, LIMIT, TEXT, WEATHER, Server, expect, refused, run

set_tracing_disabled(True)


class Trip(BaseModel):
    """Structured output that the client asks for."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


def _model(server: Server, by_chat: bool = False, key: str = "", name: str = "") -> Model:
    client = AsyncOpenAI(base_url=server.api, api_key=key or server.key, max_retries=0, timeout=300)
    made = OpenAIChatCompletionsModel if by_chat else OpenAIResponsesModel
    return made(model=name or server.model, openai_client=client)


def _agent(model: Model, settings: ModelSettings | None = None, **more: Any) -> Agent[Any]:
    own = ModelSettings(max_tokens=LIMIT, temperature=0)
    return Agent(name="a", instructions="Be brief.", model=model, model_settings=own.resolve(settings), **more)


def _plain(model: Model) -> None:
    got = Runner.run_sync(_agent(model), TEXT)
    expect("Paris" in got.final_output, got.final_output)


async def _streamed(model: Model) -> None:
    got = Runner.run_streamed(_agent(model), TEXT)
    kinds = [event.type async for event in got.stream_events()]
    expect("Paris" in got.final_output and "raw_response_event" in kinds, got.final_output)


def _tools(model: Model, *others: Any) -> None:
    """Have the model call a tool in the first turn, and answer in the second, where the tool is no longer offered."""
    called: list[str] = []

    @function_tool(is_enabled=lambda context, agent: not called)  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return ANSWER

    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    got = Runner.run_sync(_agent(model, forced, tools=[weather, *others]), WEATHER, max_turns=4)
    kinds = [item.type for item in got.new_items]
    expect(called and "tool_call_output_item" in kinds and got.final_output, kinds)


def _schema(model: Model) -> None:
    got = Runner.run_sync(_agent(model, output_type=Trip), TEXT)
    expect(isinstance(got.final_output, Trip), got.final_output)


def plain(server: Server) -> None:
    """Ask one question by chat completions and check the answer."""
    _plain(_model(server, by_chat=True))


def stream(server: Server) -> None:
    """Ask the question in a stream and check the text."""
    asyncio.run(_streamed(_model(server, by_chat=True)))


def tools(server: Server) -> None:
    """Have the model call a tool, and continue from its result."""
    _tools(_model(server, by_chat=True))


def schema(server: Server) -> None:
    """Get an answer parsed into a class."""
    _schema(_model(server, by_chat=True))


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused."""
    hot = _agent(_model(server), ModelSettings(temperature=9))
    refused(openai.BadRequestError, lambda: Runner.run_sync(hot, TEXT), "temperature")
    refused(openai.NotFoundError, lambda: Runner.run_sync(_agent(_model(server, name="gpt-9")), TEXT), "gpt-9")
    refused(openai.AuthenticationError, lambda: Runner.run_sync(_agent(_model(server, key="wrong")), TEXT), "key")


def responses(server: Server) -> None:
    """Try the Responses API: plain, streamed, and with a tool that the server leaves out."""
    _plain(_model(server))
    asyncio.run(_streamed(_model(server)))
    _tools(_model(server), WebSearchTool())
    _schema(_model(server))


if __name__ == "__main__":
    run({
        "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error, "responses": responses,
    })  # fmt: skip
