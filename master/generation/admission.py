"""Who runs and who waits: requests are admitted by pages, and give them back where others run short of them."""

from master.deployment.deployment import Deployment
from master.generation.line import WaitingLine
from master.generation.request import Request
from master.generation.sequence import Sequence
from tpi.kv import pages_for


class Admission:
    """The requests of an engine.

    One that waits is admitted when there are pages for all its tokens so far. Where the pages run out, who came last
    gives its own back, waits before all others, and is computed again from its tokens.
    """

    def __init__(self, most: int) -> None:
        """`most`: requests that run at once."""
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingLine()
        self.preempted = 0  # so often a request gave its pages back
        self.released: list[int] = []  # sequences whose pages the nodes are to forget
        self.most = most

    def deploy(self, deployment: Deployment) -> None:
        """From now on these are the pages. Whoever ran waits, before all others, to be computed again."""
        self._pages = deployment.pages
        self._at_once = min(self.most, deployment.limits.chunk, deployment.limits.pages)
        self.released.clear()
        for request in reversed(self.running):
            self.waiting.push_back(request)
        self.running = []

    def admit(self, now: float) -> None:
        """Let those that wait run, in turn, as long as there are pages; `now` in `perf_counter` seconds."""
        growing = sum(map(_grows, self.running)) if self.waiting.head() else 0
        while len(self.running) < self._at_once and (request := self.waiting.head()) and not request.held_up:
            sequence = request.sequence
            sequence.begin(self._pages)
            if self.running and _missing(sequence) + growing > self._pages.free:  # each will take a page at least
                self.give_back(sequence)
                return
            growing += _grows(request)
            self.running.append(self.waiting.pop())
            self._pages.append(sequence.table, len(sequence.tokens))
            request.begun = request.begun or now

    def make_room(self) -> None:
        """Have those who came last wait again, until there are pages for the next tokens of the others."""
        while len(self.running) > 1:
            if sum(_missing(each.sequence) for each in self.running) <= self._pages.free:
                return
            request = self.running.pop()
            self.give_back(request.sequence)
            self.waiting.push_back(request)
            self.preempted += 1

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


def _missing(sequence: Sequence) -> int:
    """Pages that all its known tokens take beyond those that it has."""
    return max(0, pages_for(len(sequence.tokens)) - len(sequence.table))


def _grows(request: Request) -> bool:
    """Whether its answer may take pages beyond those of its tokens so far; the last token is not computed with."""
    tokens = len(request.sequence.tokens)
    return pages_for(tokens + request.limit - request.made - 1) > pages_for(tokens)
