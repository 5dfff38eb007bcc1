"""Fair shares of places and pages: by client, and within a client by HTTP request.

The weight of a holding is its share of the pages or of the places, whichever is larger (Ghodsi et al. 2011,
Dominant Resource Fairness). A running request gives way to a waiting one if its client would afterwards still weigh at
least as much as the waiting one's client. Therefore two clients never preempt each other in turn.
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from master.generation.request import Request
from tpi.kernels.kv import pages_for

SLICE_S = 10.0
"""Seconds that a request runs at least before it gives way to a client with less than a fair share."""


@dataclass(frozen=True)
class Room:
    """The number of pages that all clients share, and the number of requests that may run at once (`places`)."""

    pages: int
    places: int

    def weight(self, pages: int, places: int) -> float:
        """Return the larger of two shares, from 0 to 1: `pages` of all pages, and `places` of all places."""
        return max(pages / self.pages, places / self.places)


class Holdings:
    """The pages and places held by the clients of running requests."""

    def __init__(self, room: Room, running: Iterable[Request]) -> None:
        self._room = room
        self._held: dict[Hashable, tuple[int, int]] = {}  # (pages, places), by client name and by `Client`
        for request in running:
            self._count(request, 1)

    def weight(self, key: Hashable) -> float:
        """Return the dominant share, from 0 to 1, of `key`: a client's name, or one `Client`."""
        return self._room.weight(*self._held.get(key, (0, 0)))

    def remove(self, request: Request) -> None:
        """Subtract a request's pages and its place from those of its client."""
        self._count(request, -1)

    def within(self, request: Request, fair: float, part: float, counted: bool) -> bool:
        """Return True if the request's client weighs at most `fair`, and its HTTP request at most `part`.

        A weight is a dominant share, from 0 to 1. With `counted`, the waiting request itself is counted as if it ran.
        """
        if counted:
            return self._with(request) <= fair and self._changed(request.client, request, 1) <= part
        return self.weight(request.client.name) <= fair and self.weight(request.client) <= part

    def heaviest(self, running: SequenceOf[Request]) -> list[Request]:
        """Return the running requests in the order of preemption: the heaviest client's latest request first."""
        order = sorted(enumerate(running), key=lambda pair: (*self._weights(pair[1]), pair[0]), reverse=True)
        return [request for _, request in order]

    def gives_way(self, runs: Request, waits: Request, fair: float, now: float) -> bool:
        """Return True if `runs` should be preempted for `waits`.

        `runs` is preempted if its client would afterwards still weigh at least as much as the other client with
        `waits`. Within a client, its HTTP requests are compared in this way. `runs` is also preempted if it has run for
        `SLICE_S`, its client weighs more than the fair share `fair`, and the other client with `waits` would not. `now`
        is in seconds.
        """
        if runs.client is waits.client:
            return False
        if runs.client.name == waits.client.name:
            return self._changed(runs.client, runs, -1) >= self._changed(waits.client, waits, 1)
        if self._changed(runs.client.name, runs, -1) >= self._with(waits):
            return True
        heavy = self.weight(runs.client.name) > fair >= self._with(waits)
        return heavy and now - runs.admitted >= SLICE_S

    def _with(self, request: Request) -> float:
        return self._changed(request.client.name, request, 1)

    def _weights(self, request: Request) -> tuple[float, float]:
        return self.weight(request.client.name), self.weight(request.client)

    def _changed(self, key: Hashable, request: Request, sign: int) -> float:
        pages, places = self._held.get(key, (0, 0))
        return self._room.weight(pages + sign * _pages(request), places + sign)

    def _count(self, request: Request, sign: int) -> None:
        for key in (request.client.name, request.client):
            pages, places = self._held.get(key, (0, 0))
            self._held[key] = pages + sign * _pages(request), places + sign


def _pages(request: Request) -> int:
    return pages_for(len(request.sequence.tokens))
