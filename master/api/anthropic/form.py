"""The body of `/v1/messages`, and its translation to a conversation."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from master.api.answers import grammars
from master.api.answers.requests import ChatRequest, GenerationOptions
from master.api.failures import RequestError
from master.api.forms import Body, FormPart
from master.api.openai.chat_form import ToolName, check_continued, tool_use
from master.api.openai.fields import Effort, Stop, nucleus
from master.api.openai.history import result_text
from master.api.unsupported_tools import FUNCTION, OTHER, OtherTool
from master.generation.client import Client
from master.text.tokenizer import Message
from master.vocabulary.sampler import Sampling

_CLEARED = {"type": "clear_thinking_20251015"}
_THINKING_EDITS = (_CLEARED, _CLEARED | {"keep": "all"})  # templates leave out the reasoning of earlier turns anyway
_TOOLS = ("tool_use", "tool_result")
_TEXTS = ("text", "thinking", "redacted_thinking")
_ELSEWHERE = ("server_tool_use", "mcp_tool_use")  # calls that Anthropic's server ran; results have types of their own


class ContentBlock(FormPart):
    """A piece of a message: text, a tool call or a tool's result. For pieces of other kinds, only the type is read."""

    harmless = frozenset(("cache_control", "caller", "data", "signature"))
    neutral = {"citations": ([],)}  # noqa: RUF012

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | dict[str, Any] | None = None
    is_error: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, data: Any) -> Any:
        other = isinstance(data, dict) and isinstance(data.get("type"), str)
        return {"type": data["type"]} if other and data["type"] not in (*_TEXTS, *_TOOLS) else data

    @property
    def is_elsewhere(self) -> bool:
        """True for a tool call that a server ran, or for its result.

        Both are skipped, because the next text repeats the result.
        """
        return self.type in _ELSEWHERE or self.type.endswith("_tool_result")


class AnthropicTurn(FormPart):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class AnthropicTool(FormPart):
    """A tool that the model may use. Examples of input are appended to its description."""

    harmless = frozenset(("cache_control", "defer_loading", "eager_input_streaming"))
    neutral = {"allowed_callers": (["direct"],)}  # noqa: RUF012

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return FUNCTION if kind in (None, "custom") else OTHER


AnyTool = Annotated[Annotated[AnthropicTool, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(_kind)]


class AnthropicChoice(FormPart):
    """The choice of tool: free, forced, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(FormPart):
    """The switch for reasoning before the answer. `max_tokens` limits reasoning and answer together."""

    harmless = frozenset(("budget_tokens",))
    neutral = {"display": ("summarized",)}  # noqa: RUF012

    type: Literal["enabled", "adaptive", "disabled"]


class JsonOutput(FormPart):
    """Output in JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(FormPart):
    """The reasoning effort, and the form of the answer."""

    effort: Effort | None = None
    format: JsonOutput | None = None


class CountForm(Body):
    """The body of `/v1/messages/count_tokens`, as in Anthropic's API reference, "Count tokens in a message"."""

    harmless = frozenset(("cache_control", "user_profile_id", "workspace_id"))
    neutral = {  # noqa: RUF012
        "context_management": ({}, {"edits": []}, *({"edits": [edit]} for edit in _THINKING_EDITS)),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    messages: list[AnthropicTurn] = Field(min_length=1, max_length=10_000)
    model: str
    system: str | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None
    tools: list[AnyTool] | None = Field(None, max_length=128)
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def asked(self, wanted: GenerationOptions, client: Client) -> ChatRequest:
        """Return the conversation with the settings `wanted`; raise a RequestError if a field is invalid."""
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": _text(self.system, "system")})
        for index, turn in enumerate(self.messages):
            said += _messages(turn, f"messages[{index}].content")
        tools = [_tool(tool) for tool in self.tools or () if isinstance(tool, AnthropicTool)]
        others = [tool for tool in self.tools or () if isinstance(tool, OtherTool)]
        choice = self.tool_choice
        word = {"any": "required", "none": "none"}.get(choice.type, "auto") if choice else None
        only = choice.name if choice and choice.type == "tool" else None
        if choice and choice.type == "tool" and only is None:
            raise RequestError("a choice of type tool needs the tool's name", "tool_choice.name", "invalid_value")
        if choice and choice.type != "tool" and choice.name is not None:
            refusal = "tool_choice.name: a name needs tool_choice.type tool; leave the name out"
            raise RequestError(refusal, "tool_choice.name", "invalid_value")
        several = not (choice and choice.disable_parallel_tool_use)
        output, use = self.output_config or OutputConfig(), tool_use(tools, word, only, several, others)
        grammar = grammars.of_schema(output.format.schema_) if output.format else None
        wanted = replace(wanted, grammar=grammar, grammar_field="output_config.format.schema" if grammar else "")
        continued = self.messages[-1].role == "assistant" and bool(said) and said[-1]["role"] == "assistant"
        if continued:
            field = f"messages[{len(self.messages) - 1}]"
            if said[-1].get("tool_calls"):
                refusal = "the last message uses a tool; append the tool's result"
                raise RequestError(f"{field}: {refusal}", field, "invalid_value")
            check_continued(field, use, grammar is not None)
        thinking = self.thinking.type != "disabled" if self.thinking else None
        return ChatRequest(
            tuple(said), wanted, use, client=client, continued=continued, effort=output.effort, thinking=thinking
        )


class MessagesForm(CountForm):
    """The body of `/v1/messages`, as in Anthropic's API reference, "Create a message"."""

    harmless = CountForm.harmless | {"metadata"}
    neutral = {**CountForm.neutral, "service_tier": ("auto", "standard_only")}  # noqa: RUF012

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[Stop] | None = Field(None, max_length=16)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000)

    def ask(self, client: Client) -> ChatRequest:
        """Return the conversation with its sampling settings; raise a RequestError if a field is invalid."""
        own = {"temperature": self.temperature, **nucleus(self.top_p, self.top_k)}
        return self.asked(
            GenerationOptions(Sampling.of(own), self.max_tokens, tuple(self.stop_sequences or ())), client
        )


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    examples = [f"Example of input: {json.dumps(one, ensure_ascii=False)}" for one in tool.input_examples or ()]
    said = "\n".join([*([tool.description] if tool.description is not None else []), *examples])
    described = {"description": said} if said or tool.description is not None else {}
    return {"name": tool.name, **described, "parameters": tool.input_schema, "strict": bool(tool.strict)}


def _messages(turn: AnthropicTurn, field: str) -> list[Message]:
    """Return the messages of one turn; tool results become messages of their own, before the others."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result(block)}
        for block in turn.content
        if block.type == "tool_result"
    ]
    calls = [_call(block) for block in turn.content if block.type == "tool_use"]
    rest = [block for block in turn.content if block.type not in ("tool_result", "tool_use") and not block.is_elsewhere]
    text = _text(rest, field)
    if not rest and not calls:
        return list(results)
    thought = "".join(block.thinking or "" for block in rest)
    said: Message = {"role": turn.role, "content": text} | ({"tool_calls": calls} if calls else {})
    return [*results, {**said, "reasoning_content": thought} if thought else said]


def _result(block: ContentBlock) -> str:
    text = result_text(block.content)
    failed = block.is_error and not text.lower().startswith("error")
    return f"Error: {text}" if failed else text


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id or "", "type": "function", "function": function}


def _text(content: str | Sequence[ContentBlock], field: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type not in _TEXTS:
            raise RequestError(f"this model reads text only, not {block.type}", field, "unsupported_content")
    return "\n".join(block.text for block in content if block.text)
