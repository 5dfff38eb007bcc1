"""What a client asks, in the server's own words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from master.generation.client import Client
from master.generation.sampler import Sampling
from master.text.tokenizer import Message


@dataclass(frozen=True)
class Wanted:
    """How an answer is to be made, and how many of them. `tokens` None: as many as the context has room for."""

    sampling: Sampling = field(default_factory=Sampling)
    tokens: int | None = None
    stops: tuple[str, ...] = ()
    logprobs: int | None = None  # of so many best tokens beside each
    count: int = 1
    ignore_eos: bool = False
    grammar: str | None = None  # the rule `answer` in llguidance's Lark
    grammar_field: str = ""  # where the client said it


@dataclass(frozen=True)
class ToolUse:
    """The tools that a model may call: each has a name and perhaps a description and parameters (JSON schema).

    `forced`: it has to call one, of name `only` if that is given. `several`: more than one at once. `strict`: names of
    those whose arguments are held to their schema also where none has to be called. `left_out`: types of tools that
    the client offered and the model is not told of.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: bool = False
    only: str | None = None
    several: bool = True
    strict: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatAsk:
    """A conversation to go on with. Messages are as in OpenAI's chat completions, their contents plain text.

    `template` is what else the chat template is given. `client` is who asks.
    """

    messages: tuple[Message, ...]
    wanted: Wanted
    use: ToolUse = ToolUse()
    template: Mapping[str, Any] = field(default_factory=dict)
    client: Client = field(default_factory=Client)
    where: str = "messages"  # the field that holds them
    continued: bool = False  # the last message is the assistant's, and is gone on with
    effort: str | None = None  # how much to think
    effort_field: str = ""  # refused as this where the model has no setting for it
    thinking: bool | None = None  # whether to think at all, where the model can be told


@dataclass(frozen=True)
class TextAsk:
    """A text, or token ids, to go on with as they are; in a `literal` text, spelled control tokens stay text."""

    prompt: str | tuple[int, ...]
    wanted: Wanted
    client: Client = field(default_factory=Client)
    field: str = "prompt"
    echo: bool = False  # whether the answer begins with it
    literal: bool = False
