"""Requests that wait for their turn: clients take turns, and so do the HTTP requests of one client."""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from master.generation.client import Client
from master.generation.request import Request

_Lines = dict[Client, deque[Request]]  # by HTTP request, which has one `Client`


class WaitingLine:
    """One line for each client's name. In it, HTTP requests take turns: one for 16 answers is not before the next."""

    def __init__(self) -> None:
        self._lines: dict[str, _Lines] = {}  # the client whose turn is next comes first, and so in each line

    def __len__(self) -> int:
        return sum(len(line) for lines in self._lines.values() for line in lines.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests, those of an HTTP request in order."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    def push(self, request: Request) -> None:
        """Append a request to its line."""
        self._line(request).append(request)

    def push_back(self, request: Request) -> None:
        """Put a request that gave its pages back before all others of its client.

        Other clients keep their turns: what is preempted is never before them.
        """
        self._line(request).appendleft(request)
        lines, client = self._lines[request.client.name], request.client
        self._lines[client.name] = {client: lines.pop(client)} | lines

    @property
    def sizes(self) -> dict[str, int]:
        """How many HTTP requests of each client have a part in the line, by the client's name."""
        return {name: len(lines) for name, lines in self._lines.items()}

    def heads(self) -> Iterator[Request]:
        """Iterate over what may be next: of each client the first of one HTTP request, then of another.

        Requests that are held up are left out.
        """
        clients = [list(lines.values()) for lines in self._lines.values()]
        for turn in zip_longest(*clients):
            yield from (line[0] for line in turn if line and not line[0].held_up)

    def pop(self, request: Request) -> None:
        """Take out a request, which was one of `heads`: the turns of its HTTP request and of its client are over."""
        self.remove(request)
        client = request.client
        lines = self._lines.pop(client.name, {})
        if client in lines:
            lines[client] = lines.pop(client)  # to the end
        if lines:
            self._lines[client.name] = lines

    def remove(self, request: Request) -> bool:
        """Take out a request, wherever it is; return True if it was in the line."""
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
