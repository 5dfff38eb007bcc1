"""Requests whose drafts are known to be right, wrong or mixed, and what they deliver."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.request import Request, Sampled
from master.generation.speculation.pace import ROWS, Gain, Pace
from master.vocabulary.sampler import Logprobs, Sampler, Sampling
from tests.support.models import VOCAB

PROMPTS = [[1, *np.random.default_rng(seed).integers(3, VOCAB, 5 + 9 * seed).tolist()] for seed in range(8)]
ANSWER = 40
Told = tuple[int, Logprobs | None]


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as many rows as a step may have, whether that makes it faster or not."""
    monkeypatch.setattr(Pace, "drafts", property(lambda pace: True))
    monkeypatch.setattr(Gain, "off", property(lambda gain: False))
    monkeypatch.setattr(Pace, "continues", lambda pace, plain, drafted, further, spent: _fits(plain, drafted, further))
    monkeypatch.setattr(Pace, "rows", lambda pace, plain, chances: min(len(chances), ROWS - plain))


def _fits(plain: int, drafted: list[float], further: list[float]) -> bool:
    return plain + len(drafted) + len(further) <= ROWS


@dataclass
class Heard:
    """The tokens and log probabilities that a request delivered."""

    sampled: list[Sampled] = field(default_factory=list)

    def sink(self, sampled: Sampled) -> bool:
        self.sampled.append(sampled)
        return True

    @property
    def told(self) -> list[Told]:
        return [(each.token, each.logprobs) for each in self.sampled]


def answers(engine: Engine, samplers: list[Sampler], stops: frozenset[int] = frozenset()) -> list[list[Told]]:
    """Run requests that begin one step after the other and have different lengths; return what each delivered."""
    heard, asked = [Heard() for _ in samplers], list[Request]()
    for number, sampler in enumerate(samplers):
        sequence = engine.admit(PROMPTS[number])
        limit = ANSWER - 3 * number
        asked.append(Request(sequence, sampler, limit, heard[number].sink, stops, logprobs=2))
        engine.submit(asked[-1])
        engine.step()
    while engine.requests:
        engine.step()
        for request in engine.admission.running:
            assert request.sequence.pending or engine.deployment.most_in_flight > 1
        for request in asked:
            if request.finished:
                engine.release(request.sequence)
    return [each.told for each in heard]


def samplers(count: int) -> list[Sampler]:
    """Return samplers with and without penalties, bias and chance."""
    kinds = (
        Sampling(temperature=0),
        Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3),
        Sampling(temperature=0, repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
        Sampling(temperature=0.7, seed=5, bias={7: 3.0}),
    )
    return [Sampler(kinds[number % len(kinds)]) for number in range(count)]


class Oracle:
    """A drafter that knows the answers: always right, always wrong, or right by chance."""

    def __init__(self, known: list[list[Told]], right: float) -> None:
        self._known = {tuple(PROMPTS[number]): told for number, told in enumerate(known)}
        self._right, self._random = right, np.random.default_rng(1)
        self.drafted = 0

    def __call__(self, tokens: list[int], earlier: object, most: int) -> tuple[list[int], int]:
        prompt = next(each for each in self._known if tuple(tokens[: len(each)]) == each)
        coming = [token for token, _ in self._known[prompt]][len(tokens) - len(prompt) :][:most]
        found = [token if self._random.random() < self._right else (token + 1) % VOCAB for token in coming]
        self.drafted += len(found)
        return found, 8
