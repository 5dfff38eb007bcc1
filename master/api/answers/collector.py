"""One answer, on the engine's thread: tokens become text, pieces, figures; they are handed to the thread that sends."""

from collections.abc import Callable
from dataclasses import replace
from secrets import token_hex
from time import perf_counter
from typing import Protocol

from master.api.answers.events import (
    Ended,
    Event,
    Piece,
    Reason,
    ReasoningPiece,
    TextPiece,
    Timings,
    TokenLogprob,
    ToolCall,
)  # fmt: skip
from master.api.answers.prepare import PreparedAsk
from master.generation.answer import AnswerLimits, AnswerText
from master.generation.request import Sampled
from master.generation.thread import Ticket
from master.text.replay import Replay
from master.text.spelling import written
from master.text.tokenizer import Tokenizer
from tpi.errors import TpiError

Deliver = Callable[["list[Event] | TpiError"], None]


class AnswerMeter(Protocol):
    """Who counts."""

    def first_token(self, seconds: float) -> None:
        """So long after the request came."""

    def next_token(self, seconds: float) -> None:
        """So long after the one before."""

    def over(self, ticket: Ticket, prompt_tokens: int, ended: Ended | None) -> None:
        """The request is over; without `ended` it failed."""


class Collector:
    """Hears of one request, see `master.generation.thread.Listener`."""

    ticket: Ticket  # set before anything is heard

    def __init__(
        self,
        tokenizer: Tokenizer,
        prepared: PreparedAsk,
        limits: AnswerLimits,
        replay: Replay,
        meter: AnswerMeter,
        deliver: Deliver,
    ) -> None:
        self._tokenizer, self._prepared, self._replay, self._meter = tokenizer, prepared, replay, meter
        self._deliver = deliver
        self._text = AnswerText(tokenizer, limits, prepared.spelled)
        self._parser = prepared.shape.parser()
        self._tokens: list[int] = []
        self._said, self._calls = "", list[str]()
        self._cut = False  # something came after the one call that may be
        self._thought = 0  # tokens that came while the model was thinking
        self._logprobs: list[TokenLogprob] = []
        self._first = self._last = 0.0

    def token(self, sampled: Sampled) -> bool:
        """The next token."""
        self._time(sampled.at)
        self._tokens.append(sampled.token)
        if sampled.logprobs is not None and sampled.token not in self._tokenizer.eos_ids:
            self._logprobs.append(self._logprob(sampled))
        pieces = self._parser.push(self._text.push(sampled.token))
        if getattr(self._parser, "thinking", False):
            self._thought += 1
        over = self._text.finish_reason is not None
        if events := self._events(pieces + (self._parser.flush() if over else [])):
            self._deliver(events)
        return not (over or self._enough)

    def ended(self, error: TpiError | None) -> None:
        """The last call."""
        if error is not None:
            self._meter.over(self.ticket, len(self._prepared.tokens), None)
            self._deliver(error)
            return
        events: list[Event] = []
        reason: Reason = "stop" if self._text.finish_reason == "stop" else "length"
        if self._enough:
            self._remember()
            reason = "tool_calls"
        elif self._text.finish_reason is None:  # the context is full, or somebody gave up
            events = self._events(self._parser.push(self._text.flush()) + self._parser.flush())
            full = self._prepared.limit <= len(self._tokens)
            reason = "length" if full else "cancelled"
        else:
            self._remember()
            reason = "tool_calls" if self._calls and reason == "stop" else reason
        ended = self._ended(reason)
        self._meter.over(self.ticket, len(self._prepared.tokens), ended)
        self._deliver([*events, ended])

    @property
    def _enough(self) -> bool:
        """Whether the only call that may be has come."""
        return self._prepared.shape.one_call and bool(self._calls)

    def _events(self, pieces: list[Piece]) -> list[Event]:
        """Pieces with what they lack: an id for a call, logarithms for a text; none after the only call."""
        events: list[Event] = []
        for piece in pieces:
            if self._enough:
                self._cut = True
                break
            if isinstance(piece, ToolCall):
                piece = replace(piece, id=f"call_{token_hex(12)}")
                self._calls.append(piece.id)
                self._logprobs = []
            elif isinstance(piece, TextPiece):
                self._said += piece.text
                piece = TextPiece(piece.text, tuple(self._logprobs))
                self._logprobs = []
            elif isinstance(piece, ReasoningPiece):
                self._logprobs = []
            events.append(piece)
        return events

    def _remember(self) -> None:
        """For when the answer is sent back, to be gone on from; what was cut off is not sent back."""
        if self._prepared.replayable and self._text.stop_text is None and not self._cut:
            at_end = self._tokens[-1] in self._tokenizer.eos_ids
            tokens = self._tokens[:-1] if at_end else self._tokens
            salt = self.ticket.asked.client.salt
            self._replay.remember(self._said, self._calls, tokens, self._thought > 0, salt)

    def _time(self, at: float) -> None:
        if not self._tokens:
            self._first = at
            self._meter.first_token(at - self.ticket.at)
        else:
            self._meter.next_token(at - self._last)
        self._last = at

    def _ended(self, reason: Reason) -> Ended:
        begun = self.ticket.begun or perf_counter()
        timings = Timings(max(0.0, self._first - begun), self._last - self._first)
        prompt = len(self._prepared.tokens)
        return Ended(
            reason,
            prompt,
            len(self._tokens),
            self.ticket.cached,
            self._thought,
            timings,
            tuple(self._logprobs),
            self._text.stop_text,
        )

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprobs
        raw = self._tokenizer.raw
        data = raw(sampled.token)
        best = tuple((written(raw(token)), raw(token), value) for token, value in sampled.logprobs.best)
        return TokenLogprob(written(data), data, sampled.logprobs.drawn, best, self._text.begins(data))
