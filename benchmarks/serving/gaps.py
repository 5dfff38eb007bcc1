"""Pauses of an answer while a long prompt is prefilled at the same time. Every step gives the answer a token.

The engine is measured without the server: a piece of text may hold several tokens, so it does not show single steps.
Times are the process's CPU time, so other load on the machine does not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, median
from time import process_time

from benchmarks.support.models import smollm2
from master.generation.engine import Engine
from master.generation.request import Request
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling

_CONTEXT = 8192  # tokens
_ANSWERS = 4096  # tokens that an answer may take; it is withdrawn before
_WARM = 8  # steps of the answers alone


@dataclass(frozen=True)
class Gaps:
    """Seconds of each step of a prompt: alone, in whole chunks, and next to answers."""

    alone: list[float]
    beside: list[float]

    @property
    def longest(self) -> float:
        """The longest step next to answers, relative to the mean step of the prompt alone."""
        return max(self.beside) / mean(self.alone)

    @property
    def usual(self) -> float:
        """The median step next to answers, relative to the mean step of the prompt alone."""
        return median(self.beside) / mean(self.alone)

    @property
    def slower(self) -> float:
        """The seconds of the prompt next to answers, relative to its seconds alone."""
        return sum(self.beside) / sum(self.alone)


def gaps_beside(tokens: int, answers: int = 1) -> Gaps:
    """Measure the prefill of `tokens` tokens alone and next to `answers` answers, on one node with SmolLM2."""
    with Session(RunOptions(str(smollm2().path), context=_CONTEXT, parallel=2)) as session:
        list(_steps(session.engine, tokens, 0))  # warms up
        return Gaps(list(_steps(session.engine, tokens, 0)), list(_steps(session.engine, tokens, answers)))


def _steps(engine: Engine, tokens: int, answers: int) -> Iterator[float]:
    """Yield the seconds of each step until the first token after the prompt is generated."""
    others = [_request(engine, [number + 1, 2, 3], _ANSWERS) for number in range(answers)]
    for _ in range(_WARM if others else 0):
        engine.step()
    long = _request(engine, [1 + index % 1000 for index in range(tokens)], 1)
    while not long.finished:
        begun = process_time()
        engine.step()
        yield process_time() - begun
    for request in (long, *others):
        engine.withdraw(request)
        engine.release(request.sequence)


def _request(engine: Engine, prompt: list[int], limit: int) -> Request:
    request = Request(engine.admit(prompt), Sampler(Sampling(temperature=0)), limit, lambda sampled: True)
    engine.submit(request)
    return request
