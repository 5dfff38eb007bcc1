"""One answer: sampled tokens to streamed text, with end-of-turn, stop texts, limits, and its timing."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from master.generation.engine import Engine
from master.generation.sampler import Sampler
from master.generation.sequence import Sequence
from master.text.channels import SPELLED, ShownChannels, has_channels
from master.text.prompts import checked_text
from master.text.stops import StopFilter
from master.text.tokenizer import Message, Tokenizer
from tpi.errors import UsageError

_CONTINUATION = range(0x80, 0xC0)  # bytes of UTF-8 that begin no character

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass
class Answer:
    """What came out, and how fast. Times in seconds; rates in tokens per second."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    ttft: float = 0.0
    decode_seconds: float = 0.0  # from the first token to the last
    counted: int = 0  # tokens, where their ids are not known
    said: str | None = None  # `text` without thinking, where the model keeps them apart itself

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.ttft if self.ttft else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.count - 1) / self.decode_seconds if self.decode_seconds and self.count else 0.0

    @property
    def count(self) -> int:
        """Tokens that were made."""
        return self.counted or len(self.token_ids)


@dataclass(frozen=True)
class AnswerLimits:
    """When to stop: after `tokens` tokens, at any of the stop texts, or (unless `ignore_eos`) at the end of turn."""

    tokens: int
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False


class AnswerText:
    """One answer's text as its tokens come; it knows when it is over."""

    def __init__(self, tokenizer: Tokenizer, limits: AnswerLimits, spelled: Collection[int] = ()) -> None:
        """`spelled`: control tokens that are shown as they are spelled."""
        self.finish_reason: FinishReason | None = None  # None: it goes on, until its limit
        self.made = 0
        self.stop_text: str | None = None  # at which it ended
        self._eos = frozenset[int]() if limits.ignore_eos else tokenizer.eos_ids
        self._limits = limits
        self._decoded = 0  # characters of the tokens so far, before a stop text cuts them
        self._stream, self._filter = tokenizer.stream(spelled), StopFilter(limits.stops)

    def begins(self, data: bytes) -> int:
        """Where the text of the next token begins, of these bytes: at the first one of its character."""
        goes_on = data[:1] and data[0] in _CONTINUATION
        return self._decoded + (0 if goes_on else len(self._stream.held))

    def resume(self, tokens: SequenceOf[int]) -> str:
        """Take in the tokens of an earlier part of this answer, which count for no limit; return their text."""
        decoded = "".join(map(self._stream.push, tokens))
        self._decoded += len(decoded)
        return self._filter.push(decoded)

    def push(self, token: int) -> str:
        """The text that the next token completes; nothing may come after the last one."""
        self.made += 1
        if token in self._eos:
            self.finish_reason = "stop"
            return self.flush()
        decoded = self._stream.push(token)
        self._decoded += len(decoded)
        text = self._filter.push(decoded)
        if self._filter.stopped:
            self.finish_reason, self.stop_text = "stop", self._filter.found
        elif self.made >= self._limits.tokens:
            self.finish_reason = "length"
            text += self.flush()
        return text

    def flush(self) -> str:
        """What was held back, at the end of an answer."""
        return "" if self._filter.stopped else self._filter.push(self._stream.flush()) + self._filter.flush()


class _ShownText:
    """An answer's text on its way to whoever sees it: as it is, or by its channels where a model writes in such."""

    def __init__(self, tokenizer: Tokenizer, limits: AnswerLimits, result: Answer, show: Callable[[str], None]) -> None:
        """What is shown is in `result`, too."""
        self._channels = ShownChannels() if has_channels(tokenizer.chat_template) else None
        found = [tokenizer.control(name) for name in SPELLED] if self._channels else []
        self._text = AnswerText(tokenizer, limits, [token for token in found if token is not None])
        self._result, self._show = result, show

    def resume(self, tokens: SequenceOf[int]) -> None:
        """Take in an earlier part of this answer, which was shown already."""
        text = self._text.resume(tokens)
        self._result.text = self._channels.push(text) if self._channels else text

    def push(self, token: int) -> bool:
        """The next token; whether the answer ends with it, for the reason that the result has then."""
        piece, ended = self._text.push(token), self._text.finish_reason
        self._emit(piece, last=ended is not None)
        self._result.finish_reason = ended or self._result.finish_reason
        return ended is not None

    def flush(self) -> None:
        """What was held back, where it ends for another reason."""
        self._emit(self._text.flush(), last=True)

    def _emit(self, piece: str, last: bool) -> None:
        if self._channels:
            piece = self._channels.push(piece) + (self._channels.flush() if last else "")
            self._result.said = self._channels.said
        self._result.text += piece
        if piece:
            self._show(piece)


def answer(
    engine: Engine,
    tokenizer: Tokenizer,
    sequence: Sequence,
    sampler: Sampler,
    limits: AnswerLimits,
    show: Callable[[str], None] = lambda text: None,
    mark: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
    begun: SequenceOf[int] = (),
) -> Answer:
    """Generate one answer to the pending tokens of `sequence`, passing text to `show` as it comes.

    `begun` are the last tokens of `sequence` if they are the answer's own, cut earlier: the result's text begins with
    theirs, which is not shown again, and its `token_ids` are the new ones alone. `mark` is called once, between the
    first token and the second: what is counted from there on is decoding.
    `stopped` is asked between steps; where it says so, the answer ends as interrupted.

    Raises:
        NodeLost, NodeError: if a worker is lost or fails; what was shown stays shown.
    """
    result, started = Answer(prompt_tokens=sequence.pending), perf_counter()
    text, first = _ShownText(tokenizer, limits, result, show), started
    text.resume(begun)
    for sampled in engine.generate(sequence, sampler, limits.tokens, stopped):
        result.token_ids.append(sampled.token)
        if len(result.token_ids) == 1:
            result.ttft = sampled.at - started
            mark()
            first = perf_counter()
        else:
            result.decode_seconds = sampled.at - first
        if text.push(sampled.token):
            return result
    result.finish_reason = "interrupted" if stopped() else "length"
    text.flush()
    return result


def prompt_messages(prompt: str, system: str | None, raw: bool) -> list[Message]:
    """The conversation that one prompt is, with a system message before it.

    Raises:
        UsageError: if the system message is not UTF-8, or given with `raw`.
    """
    if system is None:
        return [{"role": "user", "content": prompt}]
    if raw:
        raise UsageError("--system goes through the chat template, which --raw leaves out; give one of them")
    return [
        {"role": "system", "content": checked_text(system, "the system message")},
        {"role": "user", "content": prompt},
    ]


def encode_prompt(tokenizer: Tokenizer, messages: SequenceOf[Message], raw: bool) -> SequenceOf[int]:
    """Token ids of a conversation: through the chat template, or with `raw` (or without a template) as it is.

    Raises:
        ModelError: if the template refuses it.
    """
    if raw:
        return tokenizer.encode("".join(message["content"] for message in messages))
    return tokenizer.encode_chat(messages)
