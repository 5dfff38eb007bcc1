"""One answer: sampled tokens to streamed text, with end-of-turn, stop texts, limits, and its timing."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from master.generation.engine import Engine
from master.generation.sampler import Sampler
from master.generation.sequence import Sequence
from master.generation.stops import StopFilter
from master.text.prompts import checked_text
from master.text.tokenizer import Message, Tokenizer
from tpi.errors import UsageError

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

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.ttft if self.ttft else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.token_ids) - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class AnswerLimits:
    """When to stop: after `tokens` tokens, at any of the stop texts, or (unless `ignore_eos`) at the end of turn."""

    tokens: int
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False


def answer(
    engine: Engine,
    tokenizer: Tokenizer,
    sequence: Sequence,
    sampler: Sampler,
    limits: AnswerLimits,
    show: Callable[[str], None] = lambda text: None,
    mark: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Generate one answer to the pending tokens of `sequence`, passing text to `show` as it comes.

    `mark` is called once, between the first token and the second: what is counted from there on is decoding.
    `stopped` is asked between steps; where it says so, the answer ends as interrupted.

    Raises:
        NodeLost, NodeError: if a worker is lost or fails; what was shown stays shown.
    """
    result = Answer(prompt_tokens=sequence.pending)
    stream, filter_ = tokenizer.stream(), StopFilter(limits.stops)
    started = first = perf_counter()

    def emit(text: str) -> None:
        result.text += text
        if text:
            show(text)

    for sampled in engine.generate(sequence, sampler, limits.tokens, stopped):
        result.token_ids.append(sampled.token)
        if len(result.token_ids) == 1:
            result.ttft = sampled.at - started
            mark()
            first = perf_counter()
        else:
            result.decode_seconds = sampled.at - first
        if sampled.token in tokenizer.eos_ids and not limits.ignore_eos:
            result.finish_reason = "stop"
            break
        emit(filter_.push(stream.push(sampled.token)))
        if filter_.stopped:
            result.finish_reason = "stop"
            break
    if stopped() and result.finish_reason == "length":
        result.finish_reason = "interrupted"
    if not filter_.stopped:
        emit(filter_.push(stream.flush()) + filter_.flush())
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
