"""What a user asked, as the engine runs it: a sequence, how tokens are drawn, when it ends, and who hears of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from master.generation.sampler import Logprobs, Sampler
from master.generation.sequence import Sequence


@dataclass(frozen=True)
class Sampled:
    """A new token of a sequence, and when its step ended (`perf_counter` seconds)."""

    sequence: Sequence
    token: int
    at: float
    logprobs: Logprobs | None = None


Sink = Callable[[Sampled], bool]
"""Called with each token as it is drawn; False ends the request."""

RowSink = Callable[[npt.NDArray[np.float32]], None]
"""Called with hidden states `[tokens, hidden]` after the last block, in order."""


@dataclass(eq=False)
class Request:
    """One answer under way to the pending tokens of `sequence`.

    It ends after `limit` tokens, at any token of `stops` (which `sink` hears of too), when `sink` has enough, or where
    the context is full. With `rows` no token is drawn: it hears of hidden states, and the request ends with the prompt.

    `client` is who asks, for a fair order. A request that `follows` another waits until that one's prompt is computed,
    to begin with its pages.
    """

    sequence: Sequence
    sampler: Sampler
    limit: int
    sink: Sink
    stops: frozenset[int] = field(default_factory=frozenset)
    rows: RowSink | None = None
    client: str = ""
    follows: "Request | None" = None
    logprobs: int | None = None  # of so many best tokens beside each that was drawn
    made: int = 0
    begun: float | None = None  # when it was admitted first, `perf_counter` seconds
    finished: bool = False

    @property
    def held_up(self) -> bool:
        """Whether what it follows is still to be computed."""
        first = self.follows
        return first is not None and not first.finished and not first.made

    def draw(self, logits: npt.NDArray[np.float32], at: float) -> Sampled:
        """The next token from `logits` `[vocab]`, appended to the sequence.

        Raises:
            NotFiniteError: if the greatest logit is no number.
        """
        tokens = self.sequence.tokens
        token, logprobs = self.sampler.draw(logits, tokens, len(tokens) - self.made, self.logprobs)
        tokens.append(token)
        return Sampled(self.sequence, token, at, logprobs)

    def push(self, sampled: Sampled, context: int) -> None:
        """A token was drawn, in a context of so many."""
        self.made += 1
        wanted = self.sink(sampled)
        full = self.made >= self.limit or len(self.sequence.tokens) >= context
        self.finished = not wanted or full or sampled.token in self.stops
