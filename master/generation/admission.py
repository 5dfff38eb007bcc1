"""Admission of requests: which run and which wait. Places and pages are shared fairly between clients."""

from collections.abc import Iterator
from itertools import islice

from master.deployment.deployment import Deployment
from master.generation.fairness import Holdings, Room
from master.generation.line import WaitingLine
from master.generation.request import Request
from master.generation.sequence import Sequence
from tpi.kv import pages_for

_PATIENCE_S = 10.0
"""Seconds after which a request that finds no room lets none be admitted before it."""

_MOST_TRIED = 8
"""Waiting requests that are tried in one step: each costs a hash over its prompt."""


class Admission:
    """The requests of an engine.

    A waiting request is admitted when there are pages for all its tokens so far, or when running requests of clients
    that hold more have to give way to it. Where pages run out, the client that holds most gives pages back. A request
    that gave its pages back waits in its client's line, and is computed again from its tokens.
    """

    def __init__(self, most: int) -> None:
        """`most`: requests that run at once."""
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingLine()
        self.preempted = 0  # so often a request gave its pages back
        self.released: list[int] = []  # sequences whose pages the nodes are to forget
        self.most = most

    def deploy(self, deployment: Deployment) -> None:
        """Use the pages of `deployment` from now on. What ran waits, first in its client's line."""
        self._pages = deployment.pages
        self._at_once = min(self.most, deployment.limits.chunk, deployment.limits.pages)
        self._room = Room(self._pages.total, self._at_once)
        self.released.clear()
        for request in reversed(self.running):
            self.waiting.push_back(request)
        self.running = []

    def admit(self, now: float) -> None:
        """Let waiting requests run, in turn, as long as there is room; `now` in `perf_counter` seconds."""
        while any(self._try(request, now) for request in self._candidates(now)):
            pass

    def make_room(self) -> None:
        """Preempt requests of the client that holds most, until there are pages for the next tokens of the others."""
        while len(self.running) > 1:
            if sum(_missing(each.sequence) for each in self.running) <= self._pages.free:
                return
            self._preempt(Holdings(self._room, self.running).heaviest(self.running)[0])

    def withdraw(self, request: Request) -> None:
        """Take a request out, wherever it is; its sequence keeps what it has."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def give_back(self, sequence: Sequence) -> None:
        """Give a sequence's pages back, here and on every node; what they hold can be found as long as it is there."""
        if sequence.announced:
            self.released.append(sequence.id)
        sequence.leave(self._pages)

    def _candidates(self, now: float) -> Iterator[Request]:
        """Iterate over the requests to try, in turn, until one of them runs.

        None comes after one that waits for its fair share: what becomes free is for that one. After a while the same
        holds for one that alone takes more than a fair share.
        """
        held, sizes = Holdings(self._room, self.running), self.waiting.sizes
        fair = self._fair() if sizes else 0.0
        for request in islice(self.waiting.heads(), _MOST_TRIED):
            yield request
            part = fair / sizes[request.client.name]
            late = request.blocked is not None and now - request.blocked > _PATIENCE_S
            if held.within(request, fair, part, counted=not late):
                return

    def _try(self, request: Request, now: float) -> bool:
        """Admit `request` if there is room, or if there will be once others gave way; return True if it runs."""
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
        request.begun, request.admitted, request.blocked = request.begun or now, now, None
        return True

    def _givers(self, request: Request, now: float) -> list[Request] | None:
        """Return the running requests that are to make room for `request`; None if they cannot make enough."""
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
        """Return True if `request` can run beside `running`, of which each that grows will take a page at least."""
        if not running:
            return True
        growing = sum(map(_grows, running))
        return len(running) < self._at_once and _missing(request.sequence) + growing <= free

    def _fair(self) -> float:
        """Return the share of everything that each client may have if all want it."""
        return 1 / len(set(self.waiting.sizes) | {each.client.name for each in self.running})

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.give_back(request.sequence)
        self.waiting.push_back(request)
        self.preempted += 1


def _missing(sequence: Sequence) -> int:
    """Pages that all its known tokens take beyond those that it has."""
    return max(0, pages_for(len(sequence.tokens)) - len(sequence.table))


def _grows(request: Request) -> bool:
    """Whether its answer may take pages beyond those of its tokens so far; the last token is not computed with."""
    tokens = len(request.sequence.tokens)
    return pages_for(tokens + request.limit - request.made - 1) > pages_for(tokens)
