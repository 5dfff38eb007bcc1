"""Collector of one answer, on the engine's thread: it turns tokens into text, tool calls and statistics."""

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
from master.api.answers.prepare import PreparedRequest
from master.generation.answer import AnswerLimits, AnswerText
from master.generation.request import Sampled
from master.generation.thread import Ticket
from master.text.replay import Replay
from master.text.spelling import written
from master.text.tokenizer import Tokenizer
from tpi.errors import TpiError

Deliver = Callable[["list[Event] | TpiError"], None]


class AnswerMeter(Protocol):
    """Receiver of the timing and token counts of answers."""

    def first_token(self, seconds: float) -> None:
        """Record the seconds from the arrival of the request to its first token."""

    def next_token(self, seconds: float) -> None:
        """Record the seconds since the previous token."""

    def over(self, ticket: Ticket, prompt_tokens: int, ended: Ended | None) -> None:
        """Record the end of a request; `ended` is None if the request failed."""


class Collector:
    """A `master.generation.thread.Listener` for one request: it parses the tokens and delivers the events."""

    ticket: Ticket  # set before the first call

    def __init__(
        self,
        tokenizer: Tokenizer,
        prepared: PreparedRequest,
        limits: AnswerLimits,
        replay: Replay,
        meter: AnswerMeter,
        deliver: Deliver,
    ) -> None:
        self._tokenizer, self._prepared, self._replay, self._meter = tokenizer, prepared, replay, meter
        self._deliver = deliver
        self._text = AnswerText(tokenizer, limits, prepared.spelled)
        self._parser = prepared.answer_format.parser()
        self._tokens: list[int] = []
        self._said, self._calls = "", list[str]()
        self._cut = False  # True after pieces that followed the only allowed call were dropped
        self._thought = 0  # number of reasoning tokens
        self._logprobs: list[TokenLogprob] = []
        self._first = self._last = 0.0

    def token(self, sampled: Sampled) -> bool:
        """Parse the next token and deliver its events; return False if the answer is complete."""
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
        """Deliver the text held back and the `Ended` event, or the error that ended the request. Called once."""
        if error is not None:
            self._meter.over(self.ticket, len(self._prepared.tokens), None)
            self._deliver(error)
            return
        events: list[Event] = []
        reason: Reason = "stop" if self._text.finish_reason == "stop" else "length"
        if self._enough:
            self._remember()
            reason = "tool_calls"
        elif self._text.finish_reason is None:  # the context is full, or the request was cancelled
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
        """True if the request allows only one tool call and the answer has it."""
        return self._prepared.answer_format.one_call and bool(self._calls)

    def _events(self, pieces: list[Piece]) -> list[Event]:
        """Return `pieces` as events: give each tool call an id, and each text its log probabilities.

        If only one call is allowed, drop all pieces after it.
        """
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
        """Store the answer's tokens by their text, so that later prompts that contain the answer get the same tokens.

        Do nothing if the answer was cut short, because the client then sends back a different text.
        """
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
        begun = self.ticket.first_admitted or perf_counter()
        timings = Timings(max(0.0, self._first - begun), self._last - self._first)
        prompt = len(self._prepared.tokens)
        return Ended(
            reason,
            prompt,
            len(self._tokens),
            self.ticket.cached,
            self._thought,
            timings,
            self.ticket.drafts,
            tuple(self._logprobs),
            self._text.stop_text,
        )

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprobs
        raw = self._tokenizer.raw
        data = raw(sampled.token)
        best = tuple((written(raw(token)), raw(token), value) for token, value in sampled.logprobs.best)
        return TokenLogprob(written(data), data, sampled.logprobs.drawn, best, self._text.begins(data))
