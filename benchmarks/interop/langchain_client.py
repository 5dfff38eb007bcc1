"""langchain-openai: a chat model by chat completions and by responses, and embeddings."""

from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr

from benchmarks.interop.checks import ANSWER, LIMIT, TEXT, WEATHER, Server, expect, refused, run


class Trip(BaseModel):
    """Structured output that the client asks for."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


@tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """Return the weather of a city."""
    return ANSWER


def chat(server: Server, **more: Any) -> ChatOpenAI:
    """Create a chat model that does not retry."""
    settings: dict[str, Any] = {
        "model": server.model, "base_url": server.api, "api_key": SecretStr(server.key), "temperature": 0,
        "max_tokens": LIMIT, "max_retries": 0, "timeout": 300,
    }  # fmt: skip
    return ChatOpenAI(**settings | more)


def plain(server: Server) -> None:
    """Ask one question, and check the answer and the usage."""
    got = chat(server).invoke(TEXT)
    expect("Paris" in got.text and got.usage_metadata, got)


def stream(server: Server) -> None:
    """Ask the question in a stream and check the text."""
    expect("Paris" in "".join(part.text for part in chat(server).stream(TEXT)), "the text")


def _tools(model: ChatOpenAI) -> None:
    turns: list[Any] = [HumanMessage(WEATHER)]
    first: Any = model.bind_tools([weather], tool_choice="any").invoke(turns)
    expect(first.tool_calls and first.tool_calls[0]["name"] == "weather", first)
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
    second = model.bind_tools([weather], tool_choice="none").invoke([*turns, first, *results])
    expect(second.text, second)


def tools(server: Server) -> None:
    """Have the model call a tool, and continue from its result."""
    _tools(chat(server))


def schema(server: Server) -> None:
    """Get an answer parsed into a class, by a schema and by a tool call."""
    for method in ("json_schema", "function_calling"):
        got = chat(server).with_structured_output(Trip, method=method).invoke(TEXT)
        expect(isinstance(got, Trip), (method, got))


def error(server: Server) -> None:
    """Check that a bad field, another model and a wrong key are refused."""
    refused(openai.BadRequestError, lambda: chat(server, temperature=9).invoke(TEXT), "temperature")
    refused(openai.NotFoundError, lambda: chat(server, model="gpt-9").invoke(TEXT), "gpt-9")
    refused(openai.AuthenticationError, lambda: chat(server, api_key=SecretStr("wrong")).invoke(TEXT), "key")


def embeddings(server: Server) -> None:
    """Make vectors of two texts, which the client sends as token ids unless an option turns that off."""
    model = OpenAIEmbeddings(
        model=server.model, base_url=server.api, api_key=SecretStr(server.key), check_embedding_ctx_length=False
    )
    expect([len(one) > 100 for one in model.embed_documents(["one", "two"])] == [True, True], "vectors")


def responses(server: Server) -> None:
    """Ask with the Responses API: plain, streamed, with a tool, as a class."""
    model = chat(server, use_responses_api=True)
    expect("Paris" in model.invoke(TEXT).text, "plain")
    expect("Paris" in "".join(part.text for part in model.stream(TEXT)), "a stream")
    _tools(model)
    expect(isinstance(model.with_structured_output(Trip).invoke(TEXT), Trip), "a class")


if __name__ == "__main__":
    run({
        "plain": plain, "stream": stream, "tools": tools, "schema": schema, "error": error, "embeddings": embeddings,
        "responses": responses,
    })  # fmt: skip
