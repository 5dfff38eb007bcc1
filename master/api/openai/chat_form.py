"""The body of `/v1/chat/completions`, and its translation to a conversation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from master.api.answers.requests import ChatRequest, GenerationOptions, ToolOptions
from master.api.failures import RequestError
from master.api.forms import FormPart, call_arguments
from master.api.openai.fields import (
    MOST_LOGPROBS,
    CommonFields,
    Effort,
    ResponseFormat,
    TokenLimit,
    grammar_of,
    limit_of,
    one_of,
)
from master.api.unsupported_tools import FUNCTION, OTHER, OtherTool, kind_of_tool, refuse_choice, types_of
from master.api.unused import CACHING, SENT_BACK
from master.generation.client import Client
from master.text.templates.names import may_be_given
from master.text.tokenizer import Message

_MOST_MESSAGES = 10_000
_MOST_TOOLS = 128
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(FormPart):
    """A part of a message. Only text is supported; for other parts, only the type is read."""

    harmless = CACHING | SENT_BACK

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, data: Any) -> Any:
        other = isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] not in TEXT_PARTS
        return {"type": data["type"]} if other else data


class CalledFunction(FormPart):
    """The name of a called function, with its arguments as JSON."""

    name: ToolName
    arguments: str = "{}"


class CalledCustom(FormPart):
    """A call of a tool that is not a function, with any text as its input."""

    name: str = Field(max_length=128)
    input: str = ""


class MessageCall(FormPart):
    """A call of a function by the assistant in an earlier turn."""

    harmless = frozenset(("extra_content", "index", "provider_specific_fields"))

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class OtherCall(FormPart):
    """A call of a custom tool by the assistant in an earlier turn, on another server."""

    id: str = ""
    type: Literal["custom"]
    custom: CalledCustom


AnyCall = Annotated[
    Annotated[MessageCall, Tag(FUNCTION)] | Annotated[OtherCall, Tag(OTHER)], Discriminator(kind_of_tool)
]


class ChatMessage(FormPart):
    """One message.

    `prefix: true` in the last message (from the APIs of DeepSeek and Mistral) means `continue_final_message`.
    """

    harmless = SENT_BACK | {"cache_control", "id"}
    neutral = {"images": ([],)}  # noqa: RUF012

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[AnyCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    prefix: bool | None = None


class ToolFunction(FormPart):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(FormPart):
    """A function as an entry of `tools`."""

    harmless = CACHING

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(FormPart):
    """The name of the function that must be called."""

    name: str


class NamedTool(FormPart):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


AnyTool = Annotated[
    Annotated[FunctionTool, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(kind_of_tool)
]
AnyChoice = Annotated[
    Annotated[NamedTool, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(kind_of_tool)
]


class ChatForm(CommonFields):
    """The body of `/v1/chat/completions`, as in OpenAI's API reference; `chat_template_kwargs` is as in vLLM's."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST_MESSAGES)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[AnyTool] | None = Field(None, max_length=_MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, bool | int | str] | None = None

    def ask(self, client: Client) -> ChatRequest:
        """Return the conversation with its settings; raise a RequestError if a field is invalid."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
        grammar, field = grammar_of(self.response_format)
        wanted = GenerationOptions(
            self.sampling(),
            limit_of(one_of(self, "max_completion_tokens", "max_tokens")),
            self.stops(),
            (self.top_logprobs or 0) if self.logprobs else None,
            self.n or 1,
            bool(self.ignore_eos),
            grammar,
            field,
        )
        messages = tuple(as_message(message, index) for index, message in enumerate(self.messages))
        use, names = self._tool_use(), dict[str, Any](self._template_names())
        if self.add_generation_prompt is False:
            names["add_generation_prompt"] = False
        continued = self._is_continued(use, grammar is not None)
        effort = self.reasoning_effort
        return ChatRequest(
            messages, wanted, use, names, client, continued=continued, effort=effort, effort_field="reasoning_effort"
        )

    def _tool_use(self) -> ToolOptions:
        given = self.tools or ()
        tools = [tool.function.model_dump(exclude_none=True) for tool in given if isinstance(tool, FunctionTool)]
        others = [tool for tool in given if isinstance(tool, OtherTool)]
        if isinstance(self.tool_choice, OtherTool):
            raise refuse_choice(self.tool_choice)
        choice = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        word = self.tool_choice if isinstance(self.tool_choice, str) else None
        return tool_use(tools, word, choice, self.parallel_tool_calls is not False, others)

    def _is_continued(self, use: ToolOptions, formed: bool) -> bool:
        """Return True if the answer continues the last message; raise RequestError if it cannot."""
        last, place = self.messages[-1], f"messages[{len(self.messages) - 1}].prefix"
        field = "continue_final_message" if self.continue_final_message else place
        if any(message.prefix for message in self.messages[:-1]):
            said = "messages: only the last one can be continued; leave prefix out of the others"
            raise RequestError(said, "messages", "invalid_value")
        if not (self.continue_final_message or last.prefix):
            return False
        if self.continue_final_message and self.add_generation_prompt:
            said = "it cannot be combined with add_generation_prompt: true; remove one of them"
            raise RequestError(f"{field}: {said}", field, "invalid_value")
        if last.role != "assistant" or last.tool_calls:
            raise RequestError(
                f"{field}: the last message is not a text message of the assistant", field, "invalid_value"
            )
        check_continued(field, use, formed)
        return True

    def _template_names(self) -> dict[str, bool | int | str]:
        """Return `chat_template_kwargs`; raise RequestError for a name that is reserved."""
        names = self.chat_template_kwargs or {}
        for name in names:
            if not may_be_given(name):
                field = f"chat_template_kwargs.{ascii(name)[1:-1]:.64}"
                said = "this name is reserved in chat templates; leave it out, or set the request field of that name"
                raise RequestError(f"{field}: {said}", field, "invalid_value")
        return names


def check_continued(field: str, use: ToolOptions, formed: bool) -> None:
    """Raise RequestError if a continued answer must match a grammar: a grammar describes only whole answers."""
    if formed or use.forced:
        what = "a tool that has to be called" if use.forced else "a form of the answer"
        said = f"a message that is continued cannot be combined with {what}; remove one of them"
        raise RequestError(f"{field}: {said}", field, "invalid_value")


def tool_use(
    tools: Sequence[Mapping[str, Any]],
    choice: str | None,
    only: str | None,
    several: bool = True,
    others: Sequence[OtherTool] = (),
) -> ToolOptions:
    """Return the tools that the model may call.

    Args:
        tools: the functions of the request.
        choice: `required`, `none` or `auto`; None means `auto`.
        only: the name of the one tool that must be called.
        several: whether the answer may have more than one call.
        others: tools that are not functions; they are left out.

    Raises:
        RequestError: if two tools have the same name, or the choice names a tool that `tools` lacks.
    """
    names = [tool["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("two tools have the same name; rename one of them", "tools", "invalid_value")
    left_out = types_of(others)
    if only is not None and only not in names:
        if any(only == other.called for other in others):
            said = f"tool_choice names {only!r}, which is left out, because only functions can be called"
            raise RequestError(said, "tool_choice", "invalid_value")
        raise RequestError(f"tool_choice names {only!r}, which is not among tools", "tool_choice", "invalid_value")
    if choice == "required" and not tools:
        without = f"; tools of type {', '.join(left_out)} are left out" if left_out else ""
        raise RequestError(
            f"tool_choice required needs a tool of type function{without}", "tool_choice", "invalid_value"
        )
    if choice == "none":
        return ToolOptions(left_out=left_out)
    strict = frozenset(tool["name"] for tool in tools if tool.get("strict"))
    told = tuple({key: value for key, value in tool.items() if key != "strict"} for tool in tools)
    return ToolOptions(told, choice == "required" or only is not None, only, several and only is None, strict, left_out)


def as_message(message: ChatMessage, index: int) -> Message:
    """Return a message in the form for chat templates: its content is one text, arguments of calls are objects."""
    role = "system" if message.role == "developer" else message.role
    said: dict[str, Any] = {"role": role, "content": _text(message.content, index) or message.refusal or ""}
    if message.tool_calls:
        said["tool_calls"] = [_call(call, index, place) for place, call in enumerate(message.tool_calls)]
    elif message.content is None and role != "assistant":
        raise RequestError("a message has no content; give it one", f"messages[{index}].content", "invalid_value")
    thought = one_of(message, "reasoning_content", "reasoning")
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thought}
    return said | {name: value for name, value in more.items() if value is not None}


def _call(call: MessageCall | OtherCall, index: int, place: int) -> dict[str, Any]:
    if isinstance(call, OtherCall):
        function = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
        return {"id": call.id, "type": "function", "function": function}
    field = f"messages[{index}].tool_calls[{place}].function.arguments"
    arguments = call_arguments(call.function.arguments, field)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text(content: str | list[TextPart] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXT_PARTS:
            field = f"messages[{index}].content"
            raise RequestError(f"this model reads text only, not {part.type}", field, "unsupported_content")
    return "".join(part.text or part.refusal or "" for part in content)
