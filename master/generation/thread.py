"""The engine on its own thread, its only driver: other threads submit requests and receive tokens.

It also handles recovery, cancelling and stopping for `tpi run`, `chat`, `bench`, `serve` and `batch`.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any, Protocol, TypeVar

from master.generation.client import Client
from master.generation.engine import Engine
from master.generation.request import DraftedTokens, Request, RowSink, Sampled, fault_of
from master.vocabulary.sampler import Sampler
from tpi.errors import BusyError, TpiError

T = TypeVar("T")

logger = logging.getLogger(__name__)


StillWanted = Callable[[], bool]
"""A function that is called several times a second while workers are awaited; it returns False if no request waits."""


class Nodes(Protocol):
    """The nodes that compute. They may change between two steps."""

    def welcome(self, fresh: bool, wanted: StillWanted) -> None:
        """Let new workers join before a step. `fresh` is True if a request is about to begin."""

    def recover(self, error: TpiError, wanted: StillWanted) -> bool:
        """Replace the deployment after a step that failed; return False if the requests cannot continue."""


class FixedNodes:
    """Nodes that never change: a failed step ends its requests."""

    def welcome(self, fresh: bool, wanted: StillWanted) -> None:
        """Do nothing, because no worker can join."""

    def recover(self, error: TpiError, wanted: StillWanted) -> bool:
        """Return False, because the nodes cannot be replaced."""
        return False


class Listener(Protocol):
    """The receiver of a request's tokens. Both methods are called on the engine's thread and must return at once."""

    def token(self, sampled: Sampled) -> bool:
        """Receive the next token; return False to end the request."""

    def ended(self, error: TpiError | None) -> None:
        """Handle the end of the request, with its error if it failed. This is always the last call."""


@dataclass(frozen=True)
class EngineRequest:
    """The parameters of a `master.generation.request.Request`, as a caller gives them."""

    tokens: SequenceOf[int]
    sampler: Sampler
    limit: int
    stops: frozenset[int] = frozenset()
    rows: RowSink | None = None
    client: Client = field(default_factory=Client)
    logprobs: int | None = None


@dataclass(eq=False)
class Ticket:
    """A request that another thread submits.

    If it `follows` another ticket with the same prompt, the prompt is computed once. Times are in `perf_counter`
    seconds.
    """

    asked: EngineRequest
    listener: Listener
    follows: "Ticket | None" = None
    at: float = field(default_factory=perf_counter)
    request: Request | None = None
    turned_away: bool = False

    @property
    def first_admitted(self) -> float | None:
        """Time at which the request was first admitted, in `perf_counter` seconds; None if it was not admitted yet."""
        return self.request.first_admitted if self.request else None

    @property
    def computed(self) -> bool:
        """True once the prompt is computed and the first token is drawn."""
        return self.request is not None and self.request.made > 0

    @property
    def drafts(self) -> DraftedTokens:
        """The number of tokens drafted for the answer, and the number of right ones."""
        return self.request.drafts if self.request else DraftedTokens()

    @property
    def cached(self) -> int:
        """Number of prompt tokens that were found in the KV cache."""
        return (self.request.sequence.cached or 0) if self.request else 0


class EngineThread:
    """A thread that runs an engine until `stop`. All methods may be called from any thread."""

    def __init__(self, engine: Engine, most_waiting: int, nodes: Nodes | None = None) -> None:
        """Create the thread; `start` starts it. At most `most_waiting` requests may wait in addition to those that run.

        The methods of `nodes` (default: `FixedNodes`) are called on this thread.
        """
        self.engine = engine
        self.problem: TpiError | None = None  # the error of the last step, if it failed
        self._most = engine.admission.most + most_waiting
        self._nodes = nodes or FixedNodes()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: deque[tuple[Callable[[], None], Future[Any]]] = deque()  # calls to make between two steps
        self._live: dict[Ticket, None] = {}  # in order of arrival
        self._open = 0  # number of tickets that have not ended
        self._places = Counter[str]()  # open tickets by client, without those that are turned away
        self._lock = Lock()  # protects `_open`, `_places` and `_closing`
        self._closing = False
        self._ends = inf  # time at which the requests in progress are ended, in `perf_counter` seconds
        self._thread = Thread(target=self._run, name="engine")

    def start(self) -> None:
        """Start the thread of the engine."""
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. If the limit is reached, end one request of the client with the most to make room.

        Raises:
            BusyError: if the server is closing, or if the limit is reached and this client would then have more
                requests than the client with the most.
        """
        with self._lock:
            if self._closing:
                raise BusyError("the server is shutting down; ask again when it is back")
            if self._places.total() >= self._most and not self._make_place(ticket.asked.client.name):
                raise BusyError(f"{self._open} requests are in progress, and no more may wait; ask again later")
            self._open += 1
            self._count(ticket.asked.client.name, 1)
            self._inbox.put(lambda: self._begin(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request and call its listener's `ended`; do nothing if it has ended already."""
        self._inbox.put(lambda: self._end(ticket, None) if ticket in self._live else None)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Call `function` on the engine's thread between two steps; return a future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the future passes every error to the caller
                future.set_exception(error)

        self._inbox.put(lambda: self._calls.append((run, future)))
        return future

    def stop(self, seconds: float = 0.0) -> None:
        """Refuse new requests, let those in progress finish for `seconds`, end the others, and join the thread."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: self._end_at(perf_counter() + seconds))
        self._thread.join()

    @property
    def open(self) -> int:
        """Number of requests that have not ended."""
        return self._open

    def _run(self) -> None:
        while not self._over:
            self._take(wait=not self._live and not self._calls)
            while self._calls:
                self._calls.popleft()[0]()
            if self._live:
                self._step()
        self._leave()

    @property
    def _over(self) -> bool:
        """True if the thread must end, because it is closing and no request is left or the time is up."""
        return self._ends < inf and (not self._live or perf_counter() >= self._ends)

    def _take(self, wait: bool) -> None:
        """Run the calls in the inbox; with `wait`, block until there is at least one."""
        with suppress(Empty):
            while True:
                self._inbox.get(block=wait)()
                wait = False

    def _wanted(self) -> bool:
        """Run the calls in the inbox while the engine waits for workers; return True if any request still waits."""
        self._take(wait=False)
        return bool(self._live) and not self._over

    def _end_at(self, until: float) -> None:
        self._ends = min(self._ends, until)

    def _leave(self) -> None:
        closing = BusyError("the server is shutting down; ask again when it is back")
        self._take(wait=False)
        for ticket in list(self._live):
            self._end(ticket, closing)
        for _, future in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(closing)

    def _begin(self, ticket: Ticket) -> None:
        asked, first = ticket.asked, ticket.follows.request if ticket.follows else None
        try:
            sequence = self.engine.admit(asked.tokens, asked.rows is None, asked.client)
        except TpiError as error:
            self._close(ticket, error)
            return
        except Exception as fault:
            logger.exception("a request could not begin")
            self._close(ticket, fault_of(fault))
            return
        ticket.request = Request(
            sequence, asked.sampler, asked.limit, ticket.listener.token,
            asked.stops, asked.rows, first, asked.logprobs,
        )  # fmt: skip
        self._live[ticket] = None
        self.engine.submit(ticket.request)

    def _step(self) -> None:
        try:
            self._nodes.welcome(bool(self.engine.admission.waiting), self._wanted)
            self.engine.step()
            self.problem = None
        except TpiError as error:
            self._fail(error)
        except Exception as error:  # every listener must be called
            logger.exception("a step failed")
            self._fail(TpiError(f"a step failed: {error}; see the log"))
        for ticket in [ticket for ticket in self._live if ticket.request and ticket.request.finished]:
            self._end(ticket, ticket.request.error if ticket.request else None)

    def _fail(self, error: TpiError) -> None:
        try:
            mended = self._nodes.recover(error, self._wanted)
        except TpiError as worse:
            mended, error = False, worse
        self.problem = None if mended else error
        for ticket in [] if mended or self._over else list(self._live):
            self._end(ticket, error)

    def _end(self, ticket: Ticket, error: TpiError | None) -> None:
        assert ticket.request
        del self._live[ticket]
        self.engine.withdraw(ticket.request)
        self.engine.release(ticket.request.sequence)
        self._close(ticket, error)

    def _make_place(self, client: str) -> bool:
        """End a request of the client that has the most, so that one more of `client` can be admitted; return True.

        If `client` would then have more requests than the other one, end none and return False.
        """
        most, count = self._places.most_common(1)[0]
        if most == client or count - 1 < self._places[client] + 1:
            return False
        self._count(most, -1)
        self._inbox.put(lambda: self._turn_away(most))
        return True

    def _count(self, client: str, more: int) -> None:
        self._places[client] += more
        if not self._places[client]:
            del self._places[client]

    def _turn_away(self, client: str) -> None:
        """End the latest request of a client, preferably one that has not begun.

        `_make_place` does not count this request any more, because another client's request has its place.
        """
        own = [each for each in reversed(self._live) if each.asked.client.name == client and not each.turned_away]
        ticket = next((each for each in own if each.first_admitted is None), own[0] if own else None)
        if ticket is None:  # all of them have ended by themselves meanwhile
            with self._lock:
                self._count(client, 1)
            return
        ticket.turned_away = True
        self._end(ticket, BusyError("requests of other clients have taken this one's place; ask again later"))

    def _close(self, ticket: Ticket, error: TpiError | None) -> None:
        with self._lock:
            self._open -= 1
            if not ticket.turned_away:
                self._count(ticket.asked.client.name, -1)
        try:
            ticket.listener.ended(error)
        except Exception as fault:  # without this, the client would wait for ever and the thread would end
            logger.exception("the end of a request failed")
            ticket.listener.ended(fault_of(fault))
