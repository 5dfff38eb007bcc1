"""Requests in the server's own types, the same for every API form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from master.generation.client import Client
from master.text.tokenizer import Message
from master.vocabulary.sampler import Sampling


@dataclass(frozen=True)
class GenerationOptions:
    """Settings for `count` answers to one prompt.

    Each answer has at most `tokens` tokens; None: as many as fit into the context.
    """

    sampling: Sampling = field(default_factory=Sampling)
    tokens: int | None = None
    stops: tuple[str, ...] = ()
    logprobs: int | None = None  # how many of the most likely tokens to report for each token; None: report none
    count: int = 1
    ignore_eos: bool = False
    grammar: str | None = None  # in llguidance's Lark, with `answer` as its start rule
    grammar_field: str = ""  # the request field that the grammar comes from


@dataclass(frozen=True)
class ToolOptions:
    """The tools that a model may call: each has a name and perhaps a description and parameters (JSON schema).

    Attributes:
        tools: the tools, as the chat template is given them.
        forced: whether the answer must be a call; if `only` is given, a call of the tool with that name.
        several: whether an answer may have more than one call.
        strict: names of the tools whose arguments must match their schema even if no call is forced.
        left_out: types of offered tools that the model does not get, because they are not functions.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: bool = False
    only: str | None = None
    several: bool = True
    strict: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to continue. Messages are in the form of OpenAI's chat completions, with plain text as contents.

    `template` has further variables for the chat template. `client` identifies the sender.
    """

    messages: tuple[Message, ...]
    options: GenerationOptions
    use: ToolOptions = ToolOptions()
    template: Mapping[str, Any] = field(default_factory=dict)
    client: Client = field(default_factory=Client)
    where: str = "messages"  # the request field that holds the messages
    continued: bool = False  # the last message is the assistant's, and the answer continues it
    effort: str | None = None  # reasoning effort
    effort_field: str = ""  # the field to name in an error if the model has no setting for `effort`
    thinking: bool | None = None  # whether the model reasons at all; None: its default


@dataclass(frozen=True)
class TextRequest:
    """A text, or token ids, to continue as they are.

    In a `literal` text, the spelling of a control token is plain text and does not become that token.
    """

    prompt: str | tuple[int, ...]
    options: GenerationOptions
    client: Client = field(default_factory=Client)
    field: str = "prompt"
    echo: bool = False  # whether the answer begins with the prompt
    literal: bool = False
