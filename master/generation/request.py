"""One answer as the engine runs it: its sequence, its sampler, its limits, and the receiver of its tokens."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from master.generation.client import Client
from master.generation.sequence import Sequence
from master.vocabulary.sampler import Logprobs, Sampler
from tpi.errors import TpiError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """A new token of a sequence, and the time when its step ended (`perf_counter` seconds)."""

    sequence: Sequence
    token: int
    at: float
    logprobs: Logprobs | None = None


Sink = Callable[[Sampled], bool]
"""Called with each token as it is drawn; returns False to end the request."""

RowSink = Callable[[npt.NDArray[np.float32]], None]
"""Called with hidden states `[tokens, hidden]` after the last block, in order."""


@dataclass
class DraftedTokens:
    """The number of tokens drafted for an answer, and the number of right ones: those that were then drawn."""

    made: int = 0
    right: int = 0

    def count(self, made: int, right: int) -> None:
        """Add `made` drafted tokens, `right` of them right, to the counts."""
        self.made, self.right = self.made + made, self.right + right


@dataclass(eq=False)
class Request:
    """One answer in progress, to the pending tokens of `sequence`.

    It ends after `limit` tokens, at any token of `stops` (which is passed to `sink` too), when `sink` returns False, or
    when the context is full. If `rows` is given, no token is drawn: `rows` receives the prompt's hidden states, and the
    request ends with the prompt.

    A request that `follows` another waits until the other's prompt is computed, and then begins with its pages. A fault
    while a token is drawn or delivered ends only this request, with `error`.
    """

    sequence: Sequence
    sampler: Sampler
    limit: int
    sink: Sink
    stops: frozenset[int] = field(default_factory=frozenset)
    rows: RowSink | None = None
    follows: "Request | None" = None
    logprobs: int | None = None  # number of the best tokens that are reported with each drawn token
    made: int = 0
    drafts: DraftedTokens = field(default_factory=DraftedTokens)
    first_admitted: float | None = None  # time of the first admission, in `perf_counter` seconds
    admitted: float = 0.0  # time of the last admission
    # time since which it has waited for pages or a place although it was its client's turn
    blocked: float | None = None
    finished: bool = False
    error: TpiError | None = None  # the error that ended the request, if any

    @property
    def client(self) -> Client:
        """The sender of the request, by which places and pages are shared."""
        return self.sequence.client

    @property
    def held_up(self) -> bool:
        """True if this request follows another whose prompt is not computed yet."""
        first = self.follows
        return first is not None and not first.finished and not first.made

    @contextmanager
    def alone(self) -> Iterator[None]:
        """End only this request, with the error that the block raises, so that other requests continue."""
        try:
            yield
        except TpiError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("a request failed")
            self._fail(fault_of(error))

    def take(self, logits: npt.NDArray[np.float32], drafted: tuple[int, ...], at: float, context: int) -> int:
        """Draw the next token from the first row of `logits` and deliver it; draw another while tokens are as drafted.

        Return the number of drafted tokens that were right. A token that ends the answer counts, too.

        Args:
            logits: `[1 + len(drafted), vocab]`, after the last known token and after each drafted one.
            context: the maximum number of tokens of a sequence.
        """
        for right, row in enumerate(logits):
            with self.alone():
                self._push(self._draw(row, at), context)
            as_drafted = self.error is None and self.sequence.tokens[-1] in drafted[right : right + 1]
            if self.finished or not as_drafted:
                right += as_drafted
                self.drafts.count(len(drafted), right)
                return right
        return 0

    def take_rows(self, rows: npt.NDArray[np.float32], last: bool) -> None:
        """Deliver hidden states `[tokens, hidden]`. If they are the `last`, end the request."""
        with self.alone():
            assert self.rows is not None
            self.rows(rows)
            self.finished = last

    def _draw(self, logits: npt.NDArray[np.float32], at: float) -> Sampled:
        tokens = self.sequence.tokens
        token, logprobs = self.sampler.draw(logits, tokens, len(tokens) - self.made, self.logprobs)
        tokens.append(token)
        return Sampled(self.sequence, token, at, logprobs)

    def _push(self, sampled: Sampled, context: int) -> None:
        self.made += 1
        wanted = self.sink(sampled)
        full = self.made >= self.limit or len(self.sequence.tokens) >= context
        self.finished = not wanted or full or sampled.token in self.stops

    def _fail(self, error: TpiError) -> None:
        self.error, self.finished = error, True


def fault_of(error: Exception) -> TpiError:
    """Return the error for the client after an unexpected exception."""
    return TpiError(f"the answer failed: {type(error).__name__}: {error}; see the server's log")
