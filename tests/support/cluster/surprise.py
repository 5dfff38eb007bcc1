"""The perplexity of a text for a deployment, token by token through the engine."""

from collections.abc import Sequence

import numpy as np

from master.deployment.deployment import Deployment
from master.generation.engine import Engine
from master.generation.request import Request
from master.vocabulary.sampler import Logprobs, Sampler, Sampling
from tpi.sparsity.replay import F32


class Forced(Sampler):
    """A sampler that draws the tokens of a given text, and records the negative log probability of each."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(Sampling(temperature=0))
        self.text, self.surprises = text, list[float]()

    def draw(self, logits: F32, history: Sequence[int], prompt: int, best: int | None) -> tuple[int, Logprobs | None]:
        token = self.text[len(history)]
        values = logits.astype(np.float64)
        self.surprises.append(float(np.log(np.exp(values - values.max()).sum()) + values.max() - values[token]))
        return token, None


def engine_perplexity(deployment: Deployment, ids: Sequence[int], length: int, given: int = 1) -> float:
    """Return the perplexity of a text in pieces of `length` tokens; the first `given` of a piece are its prompt."""
    engine, surprises = Engine(deployment), list[float]()
    for begin in range(0, len(ids), length):
        forced = Forced(ids[begin : begin + length])
        sequence = engine.admit(forced.text[:given])
        engine.submit(Request(sequence, forced, len(forced.text) - given, lambda sampled: True))
        while engine.requests:
            engine.step()
        engine.release(sequence)
        surprises += forced.surprises
    return float(np.exp(np.mean(surprises)))
