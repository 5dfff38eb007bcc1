"""The body of `/v1/responses`, turned into a conversation."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from master.api.answers import grammars
from master.api.answers.ask import ChatAsk, Wanted
from master.api.failures import RequestError
from master.api.forms import FormPart, call_arguments
from master.api.openai.chat_form import TextPart, ToolName, tool_use
from master.api.openai.fields import MOST_LOGPROBS, SamplingFields, TokenLimit, limit_of
from master.text.tokenizer import Message

_MOST_ITEMS = 10_000
_MOST_INCLUDED = 32
_LOGPROBS = "message.output_text.logprobs"
_ROLES = {"developer": "system"}


Included = Literal[
    "message.output_text.logprobs",
    # of items that no answer has here: nothing is left out
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputItem(FormPart):
    """A message, a call, or what a tool answered; what else there is (reasoning) is left out."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class ResponsesTool(FormPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesChoice(FormPart):
    """The tool that is to be called."""

    type: Literal["function"]
    name: str


class OutputFormat(FormPart):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class OutputText(FormPart):
    """How the text is to be."""

    format: OutputFormat | None = None


class ResponsesForm(SamplingFields):
    """See OpenAI's API reference, "Create a model response"."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=_MOST_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    text: OutputText | None = None
    include: list[Included] | None = Field(None, max_length=_MOST_INCLUDED)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[ResponsesTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether the text comes with the logarithms of its tokens."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def messages(self) -> list[Message]:
        """What the input says, without instructions and earlier turns."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Message] = []
        for index, item in enumerate(self.input):
            _append(messages, item, index)
        return messages

    def ask(self, earlier: Sequence[Message], client: str) -> ChatAsk:
        """What is asked, after `earlier` turns; raises RequestError naming the field."""
        said: list[Message] = [*earlier, *self.messages()]
        if self.instructions is not None:
            said.insert(0, {"role": "system", "content": self.instructions})
        grammar, field = self._grammar()
        best = (self.top_logprobs or 0) if self.with_logprobs else None
        wanted = Wanted(
            self.sampling(), limit_of(self.max_output_tokens), logprobs=best, grammar=grammar, grammar_field=field
        )
        tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.tools or ()]
        only = self.tool_choice.name if isinstance(self.tool_choice, ResponsesChoice) else None
        use = tool_use(
            tools,
            self.tool_choice if isinstance(self.tool_choice, str) else None,
            only,
            self.parallel_tool_calls is not False,
        )
        return ChatAsk(tuple(said), wanted, use, client=client, where="input")

    def _grammar(self) -> tuple[str | None, str]:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None, ""
        if form.type == "json_object":
            return grammars.of_schema(grammars.ANY_OBJECT), "text.format"
        if form.schema_ is None:
            raise RequestError("a json_schema needs a schema", "text.format.schema", "invalid_value")
        return grammars.of_schema(form.schema_), "text.format.schema"


def _append(messages: list[Message], item: InputItem, index: int) -> None:
    """One item; calls belong to the message of the assistant before them."""
    field = f"input[{index}]"
    if item.type == "message":
        if item.role is None or item.content is None:
            raise RequestError("a message has a role and content", field, "invalid_value")
        messages.append({"role": _ROLES.get(item.role, item.role), "content": _text(item.content, field)})
    elif item.type == "function_call":
        _append_call(messages, item, field)
    elif item.type == "function_call_output":
        if item.output is None:
            raise RequestError("a function_call_output has an output", f"{field}.output", "invalid_value")
        text = _text(item.output, field)
        messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": text})
    elif item.type != "reasoning":
        raise RequestError(f"items of type {item.type!r} are not understood", f"{field}.type", "unsupported_content")


def _append_call(messages: list[Message], item: InputItem, field: str) -> None:
    arguments = call_arguments(item.arguments, f"{field}.arguments")
    call = {"id": item.call_id or "", "type": "function", "function": {"name": item.name or "", "arguments": arguments}}
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        messages.append({**last, "tool_calls": [*last.get("tool_calls", ()), call]})
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(content: str | list[TextPart], field: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(f"this model reads text only, no {part.type}", f"{field}.content", "unsupported_content")
    return "".join(part.text or part.refusal or "" for part in content)
