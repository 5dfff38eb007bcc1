"""The body of `/v1/messages`, turned into a conversation."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from master.api.answers.ask import ChatAsk, Wanted
from master.api.failures import RequestError
from master.api.forms import Body, FormPart
from master.api.openai.chat_form import ToolName, tool_use
from master.api.openai.fields import Stop, nucleus
from master.generation.sampler import Sampling
from master.text.tokenizer import Message

_TEXTS = ("text", "thinking", "redacted_thinking")


class ContentBlock(FormPart):
    """A piece of a message: text, a use of a tool, or what a tool answered."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None


class AnthropicTurn(FormPart):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(FormPart):
    """A tool that the model may use."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None


class AnthropicChoice(FormPart):
    """Whether a tool is to be used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountForm(Body):
    """See Anthropic's API reference, "Count tokens in a message"."""

    messages: list[AnthropicTurn] = Field(min_length=1, max_length=10_000)
    model: str
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=128)
    tool_choice: AnthropicChoice | None = None

    def asked(self, wanted: Wanted, client: str) -> ChatAsk:
        """What is asked; raises RequestError naming the field."""
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": _text(self.system, "system")})
        for index, turn in enumerate(self.messages):
            said += _messages(turn, f"messages[{index}].content")
        tools = [_tool(tool) for tool in self.tools or ()]
        choice = self.tool_choice
        word = {"any": "required", "none": "none"}.get(choice.type, "auto") if choice else None
        only = choice.name if choice and choice.type == "tool" else None
        if choice and choice.type == "tool" and only is None:
            raise RequestError("a choice of type tool has the tool's name", "tool_choice.name", "invalid_value")
        several = not (choice and choice.disable_parallel_tool_use)
        return ChatAsk(tuple(said), wanted, tool_use(tools, word, only, several), client=client)


class MessagesForm(CountForm):
    """See Anthropic's API reference, "Create a message"."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[Stop] | None = Field(None, max_length=16)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000)
    metadata: dict[str, Any] | None = None

    def ask(self, client: str) -> ChatAsk:
        """What is asked; raises RequestError naming the field."""
        own = {"temperature": self.temperature, **nucleus(self.top_p, self.top_k)}
        sampling = Sampling(**{name: value for name, value in own.items() if value is not None})  # type: ignore[arg-type]
        return self.asked(Wanted(sampling, self.max_tokens, tuple(self.stop_sequences or ())), client)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description is not None else {}
    return {"name": tool.name, **described, "parameters": tool.input_schema, "strict": bool(tool.strict)}


def _messages(turn: AnthropicTurn, field: str) -> list[Message]:
    """One turn; what tools answered are messages of their own, before the rest of it."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result(block, field)}
        for block in turn.content
        if block.type == "tool_result"
    ]
    calls = [_call(block) for block in turn.content if block.type == "tool_use"]
    rest = [block for block in turn.content if block.type not in ("tool_result", "tool_use")]
    text = _text(rest, field)
    if not rest and not calls:
        return list(results)
    thought = "".join(block.thinking or "" for block in rest)
    said: Message = {"role": turn.role, "content": text} | ({"tool_calls": calls} if calls else {})
    return [*results, {**said, "reasoning_content": thought} if thought else said]


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id or "", "type": "function", "function": function}


def _text(content: str | Sequence[ContentBlock], field: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type not in _TEXTS:
            raise RequestError(f"this model reads text only, no {block.type}", field, "unsupported_content")
    return "\n".join(block.text for block in content if block.text)


def _result(block: ContentBlock, field: str) -> str:
    """What a tool answered, as one text."""
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    for part in block.content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"this model reads text only, no {json.dumps(part.get('type'))[:50]}", field)
    return "\n".join(part["text"] for part in block.content)
