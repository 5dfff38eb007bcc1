"""Admission of requests: the choice of requests that run, while the others wait.

Clients share pages and *places* fairly. A place lets one request run, so there are as many as requests may run at once.
"""

from collections.abc import Iterator
from itertools import islice

from master.deployment.deployment import Deployment
from master.generation.fairness import Holdings, Room
from master.generation.line import WaitingQueue
from master.generation.request import Request
from master.generation.sequence import Sequence
from tpi.kernels.kv import pages_for

_PATIENCE_S = 10.0
"""Seconds after which a waiting request that does not fit keeps later requests from being admitted before it."""

_MOST_TRIED = 8
"""The most waiting requests that are tried in one step: each costs a hash over its prompt."""


class Admission:
    """The running and the waiting requests of an engine.

    A waiting request is admitted if there are pages for all its tokens so far, or if preempting requests of
    clients that hold more makes enough room. When pages run out, the client that holds most gives pages back. A
    preempted request waits in its client's line; its tokens are computed again later.
    """

    def __init__(self, most: int) -> None:
        """Create an empty admission in which at most `most` requests run at once."""
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.preempted = 0  # requests preempted so far
        self.released: list[int] = []  # ids of sequences whose page tables the nodes are to forget
        self.most = most

    def deploy(self, deployment: Deployment) -> None:
        """Use the pages of `deployment` from now on. Running requests go back to the front of their clients' lines."""
        self._pages = deployment.pages
        self._at_once = min(self.most, deployment.limits.chunk, deployment.limits.pages)
        if self._pages.states is not None:  # a sequence may read one state and write another
            self._at_once = min(self._at_once, self._pages.states.total // 2)
        self._room = Room(self._pages.total, self._at_once)
        self.released.clear()
        for request in reversed(self.running):
            self.waiting.push_back(request)
        self.running = []

    def admit(self, now: float) -> None:
        """Admit waiting requests, in turn, while places and pages are free. `now` is in `perf_counter` seconds."""
        while any(self._admit_one(request, now) for request in self._candidates(now)):
            pass

    def make_room(self) -> None:
        """Preempt requests of the client that holds most, until the other requests have pages for their next tokens."""
        while len(self.running) > 1:
            if sum(_missing(each.sequence) for each in self.running) <= self._pages.free:
                return
            self._preempt(Holdings(self._room, self.running).heaviest(self.running)[0])

    def withdraw(self, request: Request) -> None:
        """Remove a request, running or waiting. Its sequence keeps its tokens and pages."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def give_back(self, sequence: Sequence) -> None:
        """Give a sequence's pages back, on the master and on every node.

        The pages can be found by their contents until they are reused.
        """
        if sequence.announced:
            self.released.append(sequence.id)
        sequence.release_pages(self._pages)

    def _candidates(self, now: float) -> Iterator[Request]:
        """Yield the waiting requests that may be admitted now, in turn.

        The last one is the first that would not exceed its client's fair share: if there is no room for it, the next
        free pages are for it, not for the requests after it. A request that is too large for any fair share is treated
        in this way once it has waited for `_PATIENCE_S`.
        """
        held, sizes = Holdings(self._room, self.running), self.waiting.sizes
        fair = self._fair() if sizes else 0.0
        for request in islice(self.waiting.heads(), _MOST_TRIED):
            yield request
            part = fair / sizes[request.client.name]
            late = request.blocked is not None and now - request.blocked > _PATIENCE_S
            if held.within(request, fair, part, counted=not late):
                return

    def _admit_one(self, request: Request, now: float) -> bool:
        """Admit `request` if it fits, perhaps after preempting others; return True if it now runs."""
        sequence = request.sequence
        sequence.begin(self._pages)
        givers = self._givers(request, now)
        if givers is None:
            self.give_back(sequence)
            request.blocked = now if request.blocked is None else request.blocked
            return False
        self.waiting.pop(request)
        for giver in givers:
            self._preempt(giver)
        self.running.append(request)
        self._pages.append(sequence.table, len(sequence.tokens))
        request.first_admitted, request.admitted, request.blocked = request.first_admitted or now, now, None
        return True

    def _givers(self, request: Request, now: float) -> list[Request] | None:
        """Return the running requests to preempt for `request`; None if preempting does not free enough."""
        free, left, givers = self._pages.free, list(self.running), list[Request]()
        held, fair = Holdings(self._room, left), self._fair()
        while not self._fits(request, left, free):
            candidates = held.heaviest(left)
            giver = next((each for each in candidates if held.gives_way(each, request, fair, now)), None)
            if giver is None:
                return None
            givers.append(giver)
            left.remove(giver)
            held.remove(giver)
            free += self._pages.own(giver.sequence.table)
        return givers

    def _fits(self, request: Request, running: list[Request], free: int) -> bool:
        """Return True if `request` can run in addition to `running`, when every request that grows takes one more
        page.
        """
        if not running:
            return True
        growing = sum(map(_grows, running))
        return len(running) < self._at_once and _missing(request.sequence) + growing <= free

    def _fair(self) -> float:
        return 1 / len(set(self.waiting.sizes) | {each.client.name for each in self.running})

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.give_back(request.sequence)
        self.waiting.push_back(request)
        self.preempted += 1


def _missing(sequence: Sequence) -> int:
    return max(0, pages_for(len(sequence.tokens)) - len(sequence.table))


def _grows(request: Request) -> bool:
    """Return True if the rest of the answer may need further pages; the last token needs no keys and values."""
    tokens = len(request.sequence.tokens)
    return pages_for(tokens + request.limit - request.made - 1) > pages_for(tokens)
