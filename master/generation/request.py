"""What a user asked, as the engine runs it: a sequence, how tokens are drawn, when it ends, and who hears of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from master.generation.sampler import Sampler
from master.generation.sequence import Sequence


@dataclass(frozen=True)
class Sampled:
    """A new token of a sequence, and when its step ended (`perf_counter` seconds)."""

    sequence: Sequence
    token: int
    at: float


Sink = Callable[[Sampled], bool]
"""Called with each token as it is drawn; False ends the request."""


@dataclass(eq=False)
class Request:
    """One answer under way to the pending tokens of `sequence`.

    It ends after `limit` tokens, at any token of `stops` (which `sink` hears of too), when `sink` has enough, or where
    the context is full.
    """

    sequence: Sequence
    sampler: Sampler
    limit: int
    sink: Sink
    stops: frozenset[int] = field(default_factory=frozenset)
    made: int = 0
    finished: bool = False

    def push(self, sampled: Sampled, context: int) -> None:
        """A token was drawn, in a context of so many."""
        self.made += 1
        wanted = self.sink(sampled)
        full = self.made >= self.limit or len(self.sequence.tokens) >= context
        self.finished = not wanted or full or sampled.token in self.stops
