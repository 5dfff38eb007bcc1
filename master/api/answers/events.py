"""What comes of a request, piece by piece."""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was drawn, as text and as bytes, with its logarithm and those of the best ones.

    `at` is where its text begins, in characters of the answer.
    """

    text: str
    data: bytes
    logprob: float
    best: tuple[tuple[str, bytes, float], ...] = ()
    at: int = 0


@dataclass(frozen=True)
class TextPiece:
    """More of the answer. `logprobs`: of the tokens since the last piece of any kind."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ReasoningPiece:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """One call, whole. `arguments` is JSON."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Timings:
    """How long an answer took; seconds."""

    prompt_s: float  # from admission to the first token
    predicted_s: float  # from the first token to the last


@dataclass(frozen=True)
class Ended:
    """The last event of an answer. `cached` of the prompt's tokens were not computed again."""

    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    cached: int
    reasoning_tokens: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()  # of tokens that made no text
    stop_text: str | None = None  # at which it ended, if at one


Piece = TextPiece | ReasoningPiece | ToolCall
Event = Piece | Ended
