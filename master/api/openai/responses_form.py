"""The body of `/v1/responses`, and its translation to a conversation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from master.api.answers import grammars
from master.api.answers.requests import ChatRequest, GenerationOptions, ToolOptions
from master.api.failures import RequestError
from master.api.forms import FormPart
from master.api.openai.chat_form import ToolName, tool_use
from master.api.openai.fields import MOST_LOGPROBS, Effort, SamplingFields, TokenLimit, limit_of
from master.api.openai.history import AnyItems, messages_of
from master.api.unsupported_tools import FUNCTION, OTHER, OtherTool, kind_of_tool, refuse_choice
from master.api.unused import CACHING, CALLER, NEUTRAL
from master.generation.client import Client
from master.text.tokenizer import Message

_MOST_INCLUDED = 32
_LOGPROBS = "message.output_text.logprobs"


Included = Literal[
    "message.output_text.logprobs",
    # values about items that this server never has: ignored
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesTool(FormPart):
    """A function that the model may call."""

    harmless = frozenset(("defer_loading",))
    neutral = {"allowed_callers": (["direct"],), "async": (False,)}  # noqa: RUF012

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesChoice(FormPart):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


AnyTool = Annotated[
    Annotated[ResponsesTool, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(kind_of_tool)
]
AnyChoice = Annotated[
    Annotated[ResponsesChoice, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(kind_of_tool)
]


class OutputFormat(FormPart):
    """The form of the text: free, any JSON object, or JSON of a schema."""

    harmless = frozenset(("description",))

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class OutputText(FormPart):
    """Settings of the text. The verbosity has no effect; responses report it as medium."""

    format: OutputFormat | None = None
    verbosity: str | None = None


class Reasoning(FormPart):
    """The reasoning effort. Reasoning is returned in full, not as a summary."""

    neutral = {"generate_summary": ("auto",), "summary": ("auto",)}  # noqa: RUF012

    effort: Effort | None = None


class ResponsesForm(SamplingFields):
    """The body of `/v1/responses`, as in OpenAI's API reference, "Create a model response"."""

    harmless = CALLER - {"metadata"} | CACHING | {"client_metadata", "max_tool_calls"}
    neutral = {  # noqa: RUF012
        **{name: NEUTRAL[name] for name in ("priority", "skip_special_tokens")},
        "background": (False,),
        "context_management": ([],),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_usage": True}),
        "truncation": ("disabled",),
    }

    input: str | AnyItems
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    text: OutputText | None = None
    include: list[Included] | None = Field(None, max_length=_MOST_INCLUDED)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[AnyTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    service_tier: str | None = None

    @property
    def with_logprobs(self) -> bool:
        """True if the text has the log probabilities of its tokens."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    @property
    def functions(self) -> list[ResponsesTool]:
        """The functions that the model may call."""
        return [tool for tool in self.tools or () if isinstance(tool, ResponsesTool)]

    def messages(self, known: Mapping[str, Message]) -> list[Message]:
        """Return the messages of the input, without instructions and earlier turns.

        `known` has the turns of earlier items by id, for references to them.

        Raises:
            RequestError: if an item cannot be read; the message names it.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input, known)

    def ask(self, messages: Sequence[Message], client: Client) -> ChatRequest:
        """Return `messages` with the request's settings; raise a RequestError if a field is invalid."""
        said = list(messages)
        if self.instructions is not None:
            said.insert(0, {"role": "system", "content": self.instructions})
        grammar, field = self._grammar()
        best = (self.top_logprobs or 0) if self.with_logprobs else None
        wanted = GenerationOptions(
            self.sampling(), limit_of(self.max_output_tokens), logprobs=best, grammar=grammar, grammar_field=field
        )
        effort = self.reasoning.effort if self.reasoning else None
        return ChatRequest(tuple(said), wanted, self._tool_use(), client=client, where="input", effort=effort)

    def _tool_use(self) -> ToolOptions:
        tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.functions]
        others = [tool for tool in self.tools or () if isinstance(tool, OtherTool)]
        if isinstance(self.tool_choice, OtherTool):
            raise refuse_choice(self.tool_choice)
        only = self.tool_choice.name if isinstance(self.tool_choice, ResponsesChoice) else None
        word = self.tool_choice if isinstance(self.tool_choice, str) else None
        return tool_use(tools, word, only, self.parallel_tool_calls is not False, others)

    def _grammar(self) -> tuple[str | None, str]:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            if form is not None and form.schema_ is not None:
                said = "text.format.schema: it needs the type json_schema; set that type, or leave the schema out"
                raise RequestError(said, "text.format.schema", "invalid_value")
            return None, ""
        if form.type == "json_object" and form.schema_ is None:
            return grammars.of_schema(grammars.ANY_OBJECT), "text.format"
        if form.schema_ is None:
            raise RequestError("a format of type json_schema needs a schema", "text.format.schema", "invalid_value")
        return grammars.of_schema(form.schema_), "text.format.schema"
