"""The events of an answer: text, reasoning, tool calls and the end."""

from dataclasses import dataclass
from typing import Literal

from master.generation.request import DraftedTokens

Reason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer with its log probability, and the most likely tokens in its place with theirs.

    `text` and `data` are the token as text and as bytes; `at` is the index of its first character in the answer.
    """

    text: str
    data: bytes
    logprob: float
    best: tuple[tuple[str, bytes, float], ...] = ()
    at: int = 0


@dataclass(frozen=True)
class TextPiece:
    """A further piece of the answer's text. `logprobs` has the tokens since the last piece of any kind."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ReasoningPiece:
    """A further piece of the model's reasoning, which precedes its answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """One complete tool call. `arguments` is JSON."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Timings:
    """The duration of an answer, in seconds."""

    prompt_s: float  # from admission to the first token
    predicted_s: float  # from the first token to the last


@dataclass(frozen=True)
class Ended:
    """The last event of an answer. `cached` is the number of prompt tokens whose KV cache was reused."""

    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    cached: int
    reasoning_tokens: int
    timings: Timings
    drafts: DraftedTokens
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens after the last piece of text
    stop_text: str | None = None  # the stop sequence that ended the answer, if any


Piece = TextPiece | ReasoningPiece | ToolCall
Event = Piece | Ended
