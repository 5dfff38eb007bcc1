"""One answer: from sampled tokens to streamed text, with end-of-turn tokens, stop texts, limits and timing."""

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Literal

from master.generation.client import Client
from master.generation.request import DraftedTokens, Sampled
from master.generation.thread import EngineRequest, EngineThread, Ticket
from master.text.channels import SPELLED, ShownChannels, has_channels, has_recipients
from master.text.prompts import checked_text
from master.text.stops import StopFilter
from master.text.tokenizer import Message, Tokenizer
from master.vocabulary.sampler import Sampler
from tpi.errors import NodeError, TpiError, UsageError

_CONTINUATION = range(0x80, 0xC0)  # bytes that continue a UTF-8 character

_LOOK_S = 0.05  # seconds between two calls of `stopped` while no text comes

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass
class Answer:
    """The text, tokens and timing of one finished answer. Times are in seconds, rates in tokens per second."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    ttft: float = 0.0
    decode_seconds: float = 0.0  # from the first token to the last
    counted: int = 0  # number of tokens, if their ids are not known
    drafts: DraftedTokens = field(default_factory=DraftedTokens)
    said: str | None = None  # `text` without the thinking, if the model marks thinking itself

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.ttft if self.ttft else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one."""
        return (self.count - 1) / self.decode_seconds if self.decode_seconds and self.count else 0.0

    @property
    def count(self) -> int:
        """Number of tokens that were generated."""
        return self.counted or len(self.token_ids)


@dataclass(frozen=True)
class AnswerLimits:
    """Conditions that end an answer: `tokens` tokens, one of `stops`, or an end-of-turn token unless `ignore_eos`."""

    tokens: int
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False


class AnswerText:
    """The text of one answer, built token by token until a limit or stop text ends it."""

    def __init__(self, tokenizer: Tokenizer, limits: AnswerLimits, spelled: Collection[int] = ()) -> None:
        """Create an empty text. `spelled` are ids of control tokens that are written out as text."""
        self.finish_reason: FinishReason | None = None  # None while the answer goes on
        self.made = 0
        self.stop_text: str | None = None  # the stop text that ended the answer
        self._eos = frozenset[int]() if limits.ignore_eos else tokenizer.eos_ids
        self._limits = limits
        self._decoded = 0  # characters of the tokens so far, before a stop text cuts them
        self._stream, self._filter = tokenizer.stream(spelled), StopFilter(limits.stops)

    def begins(self, data: bytes) -> int:
        """Return the character offset in the answer at which the next token, `data` in UTF-8, begins.

        If `data` continues a character, return the offset of that character.
        """
        goes_on = data[:1] and data[0] in _CONTINUATION
        return self._decoded + (0 if goes_on else len(self._stream.held))

    def resume(self, tokens: SequenceOf[int]) -> str:
        """Add the tokens of an earlier part of this answer, which do not count towards limits; return their text."""
        decoded = "".join(map(self._stream.push, tokens))
        self._decoded += len(decoded)
        return self._filter.push(decoded)

    def push(self, token: int) -> str:
        """Return the text that `token` completes. Do not call this after `finish_reason` is set."""
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
        """Return the text held back. Call this once, at the end of an answer."""
        return "" if self._filter.stopped else self._filter.push(self._stream.flush()) + self._filter.flush()


class _ShownText:
    """An answer's text on its way to the display, divided by channels if the model writes in channels."""

    def __init__(self, tokenizer: Tokenizer, limits: AnswerLimits, result: Answer, show: Callable[[str], None]) -> None:
        """Create a text that is appended to `result.text` and passed to `show`."""
        template = tokenizer.chat_template
        self._channels = ShownChannels() if has_channels(template) or has_recipients(template) else None
        found = [tokenizer.control(name) for name in SPELLED] if self._channels else []
        self._text = AnswerText(tokenizer, limits, [token for token in found if token is not None])
        self._result, self._show = result, show

    def resume(self, tokens: SequenceOf[int]) -> None:
        text = self._text.resume(tokens)
        self._result.text = self._channels.push(text) if self._channels else text

    def push(self, token: int) -> bool:
        """Show the text of the next token.

        Return True if the token ends the answer; the result's `finish_reason` is then set.
        """
        piece, ended = self._text.push(token), self._text.finish_reason
        self._emit(piece, last=ended is not None)
        self._result.finish_reason = ended or self._result.finish_reason
        return ended is not None

    def flush(self) -> None:
        """Show the text that was held back, if the answer ended for another reason than a token."""
        self._emit(self._text.flush(), last=True)

    def _emit(self, piece: str, last: bool) -> None:
        if self._channels:
            piece = self._channels.push(piece) + (self._channels.flush() if last else "")
            self._result.said = self._channels.said
        self._result.text += piece
        if piece:
            self._show(piece)


class _Answering:
    """A listener that builds an answer on the engine's thread, while another thread shows its text."""

    def __init__(
        self, tokenizer: Tokenizer, limits: AnswerLimits, begun: SequenceOf[int], mark: Callable[[], None]
    ) -> None:
        self.result = Answer(prompt_tokens=0)
        self.over = False  # a token ended the text: it was not cut off
        self.error: TpiError | None = None
        self._pieces: SimpleQueue[str | None] = SimpleQueue()  # None: the end
        self._text = _ShownText(tokenizer, limits, self.result, self._pieces.put)
        self._text.resume(begun)
        self._mark, self._started, self._first = mark, perf_counter(), 0.0

    def token(self, sampled: Sampled) -> bool:
        result = self.result
        result.token_ids.append(sampled.token)
        if len(result.token_ids) == 1:
            result.ttft = sampled.at - self._started
            self._mark()
            self._first = perf_counter()
        else:
            result.decode_seconds = sampled.at - self._first
        self.over = self._text.push(sampled.token)
        return not self.over

    def ended(self, error: TpiError | None) -> None:
        if not self.over:
            self._text.flush()
        self.error = error
        self._pieces.put(None)

    def pieces(self) -> Iterator[str]:
        """Yield the text as it comes, until the answer ends; while no text comes, yield "" several times a second."""
        while True:
            try:
                piece = self._pieces.get(timeout=_LOOK_S)
            except Empty:
                piece = ""
            if piece is None:
                return
            yield piece


def answer(
    engine: EngineThread,
    tokenizer: Tokenizer,
    tokens: SequenceOf[int],
    sampler: Sampler,
    limits: AnswerLimits,
    show: Callable[[str], None] = lambda text: None,
    mark: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
    begun: SequenceOf[int] = (),
    watch: Callable[[Ticket], None] = lambda ticket: None,
    client: Client | None = None,
) -> Answer:
    """Generate one answer to the prompt `tokens`, passing text to `show` as it comes.

    Args:
        mark: called once, on the engine's thread, between the first token and the second. The time from there on counts
            as decoding.
        stopped: called several times a second. If it returns True, the answer ends with the reason "interrupted".
        begun: the last of `tokens`, if they are the beginning of this answer, which was cut off. Their text is part
            of the result's text but not shown again; `token_ids` has the new tokens only.
        watch: called with the ticket several times a second, until the answer ends.

    Raises:
        UsageError: if the prompt is empty or leaves no room in the context.
        NodeLost, NodeError: if a worker is lost or fails. Text that was shown stays shown.
    """
    heard = _Answering(tokenizer, limits, begun, mark)
    ticket, cancelled = Ticket(EngineRequest(tokens, sampler, limits.tokens, client=client or Client()), heard), False
    engine.submit(ticket)
    try:
        for piece in heard.pieces():
            watch(ticket)
            if piece:
                show(piece)
            if not cancelled and stopped():
                cancelled = True
                engine.cancel(ticket)
    except BaseException:
        engine.cancel(ticket)
        raise
    if heard.error is not None and not (cancelled and isinstance(heard.error, NodeError)):
        raise heard.error
    result = heard.result
    result.prompt_tokens, result.drafts = len(tokens) - ticket.cached, ticket.drafts
    if not heard.over:
        result.finish_reason = "interrupted" if cancelled else "length"
    return result


def prompt_messages(prompt: str, system: str | None, raw: bool) -> list[Message]:
    """Return the conversation that consists of `prompt`, after the system message if there is one.

    Raises:
        UsageError: if the system message is not UTF-8, or is given together with `raw`.
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
    """Return the token ids of a conversation, formatted by the chat template, or with `raw` (or no template) unchanged.

    Raises:
        ModelError: if the template refuses the conversation.
    """
    if raw:
        return tokenizer.encode("".join(message["content"] for message in messages))
    return tokenizer.encode_chat(messages)
