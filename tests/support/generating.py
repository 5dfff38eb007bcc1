"""Tokens of an engine without an engine thread, for tests and benchmarks that inspect it between steps."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from master.generation.answer import Answer, AnswerLimits, answer
from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.generation.sequence import Sequence
from master.generation.thread import EngineThread, Ticket
from master.session import Session
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Sampler, Sampling


def generate(engine: Engine, sequence: Sequence, sampler: Sampler, limit: int) -> Iterator[Sampled]:
    """Yield at most `limit` tokens of a sequence; compute each step when its token is requested."""
    made = deque[Sampled]()

    def sink(sampled: Sampled) -> bool:
        made.append(sampled)
        return True

    request = Request(sequence, sampler, limit, sink)
    engine.submit(request)
    try:
        while not request.finished:
            engine.step()
            while made:
                yield made.popleft()
        if request.error is not None:
            raise request.error
    finally:
        engine.withdraw(request)


def together(engine: Engine, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Return greedy answers to several prompts at once, until each sequence is `length` tokens long."""
    greedy, sequences = Sampler(Sampling(temperature=0)), [engine.admit(prompt) for prompt in prompts]
    for sequence in sequences:
        engine.submit(Request(sequence, greedy, length - len(sequence.tokens), lambda sampled: True))
    while engine.requests:
        engine.step()
    return [list(sequence.tokens) for sequence in sequences]


def answer_in(session: Session, tokens: SequenceOf[int], sampler: Sampler, limits: AnswerLimits, **more: Any) -> Answer:
    """Return the answer of a session to the prompt `tokens`, as `answer` assembles it."""
    with session.answering() as engine:
        return answer(engine, session.tokenizer, tokens, sampler, limits, **more)


def answer_alone(
    engine: Engine, tokenizer: Tokenizer, tokens: SequenceOf[int], sampler: Sampler, limits: AnswerLimits, **more: Any
) -> Answer:
    """Return the answer to the prompt `tokens`, as `answer` assembles it, while a thread runs the engine."""
    thread = EngineThread(engine, 0)
    thread.start()
    try:
        return answer(thread, tokenizer, tokens, sampler, limits, **more)
    finally:
        thread.stop()


class ScriptedThread:
    """A substitute for an engine's thread that gives every request the same tokens."""

    def __init__(self, tokens: SequenceOf[int]) -> None:
        self._tokens = tokens

    def submit(self, ticket: Ticket) -> None:
        sequence = Sequence(0, [])
        for token in self._tokens[: ticket.asked.limit]:
            if not ticket.listener.token(Sampled(sequence, token, 0.0)):
                break
        ticket.listener.ended(None)

    def cancel(self, ticket: Ticket) -> None:
        raise AssertionError("nothing is to be cancelled")
