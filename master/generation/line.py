"""The queue of waiting requests: clients take turns, and so do the HTTP requests of one client."""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from master.generation.client import Client
from master.generation.request import Request

_Lines = dict[Client, deque[Request]]  # each `Client` stands for one HTTP request


class WaitingQueue:
    """A queue with one line for each client's name.

    In a line, HTTP requests take turns, so that an HTTP request with 16 answers does not delay the others.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Lines] = {}  # the client whose turn is next comes first, and likewise in each line

    def __len__(self) -> int:
        return sum(len(line) for lines in self._lines.values() for line in lines.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests. Requests of one HTTP request come in their order of arrival."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    def push(self, request: Request) -> None:
        """Append a request to its line."""
        self._line(request).append(request)

    def push_back(self, request: Request) -> None:
        """Put a preempted request before all others of its client.

        It does not move before other clients' requests.
        """
        self._line(request).appendleft(request)
        lines, client = self._lines[request.client.name], request.client
        self._lines[client.name] = {client: lines.pop(client)} | lines

    @property
    def sizes(self) -> dict[str, int]:
        """Number of HTTP requests with waiting requests, by the client's name."""
        return {name: len(lines) for name, lines in self._lines.items()}

    def heads(self) -> Iterator[Request]:
        """Yield the requests that may be next, in turn: the first waiting request of each HTTP request.

        First comes the first HTTP request of each client, then the second of each, and so on. Requests that are held up
        are left out.
        """
        clients = [list(lines.values()) for lines in self._lines.values()]
        for turn in zip_longest(*clients):
            yield from (line[0] for line in turn if line and not line[0].held_up)

    def pop(self, request: Request) -> None:
        """Remove a request that `heads` yielded: its HTTP request and its client go to the end of the line."""
        self.remove(request)
        client = request.client
        lines = self._lines.pop(client.name, {})
        if client in lines:
            lines[client] = lines.pop(client)  # to the end
        if lines:
            self._lines[client.name] = lines

    def remove(self, request: Request) -> bool:
        """Remove a request from any place in the queue; return True if it was there."""
        client = request.client
        lines = self._lines.get(client.name, {})
        line = lines.get(client, deque[Request]())
        if request not in line:
            return False
        line.remove(request)
        if not line:
            del lines[client]
        if not lines:
            del self._lines[client.name]
        return True

    def _line(self, request: Request) -> deque[Request]:
        return self._lines.setdefault(request.client.name, {}).setdefault(request.client, deque())
