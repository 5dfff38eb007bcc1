"""Requests that wait for their turn: fair between those who ask, however many requests each of them has."""

from collections import deque
from collections.abc import Iterator

from master.generation.request import Request


class WaitingLine:
    """One line for each client; their heads take turns. Requests that were going on already are before all of them."""

    def __init__(self) -> None:
        self._again: deque[Request] = deque()
        self._lines: dict[str, deque[Request]] = {}  # whose turn is next comes first

    def __len__(self) -> int:
        return len(self._again) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Request]:
        """All of them, those of a client in order."""
        yield from self._again
        for line in self._lines.values():
            yield from line

    def push(self, request: Request) -> None:
        """At the end of its client's line."""
        self._lines.setdefault(request.client, deque()).append(request)

    def push_back(self, request: Request) -> None:
        """Before all others: it had its turn, and had to give its pages back."""
        self._again.appendleft(request)

    def head(self) -> Request | None:
        """Whose turn it is."""
        return next(iter(self), None)

    def pop(self) -> Request:
        """Take the head out; its client's turn is over."""
        if self._again:
            return self._again.popleft()
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        request = line.popleft()
        if line:
            self._lines[client] = line  # at the end
        return request

    def remove(self, request: Request) -> bool:
        """Take a request out, wherever it is; whether it was in the line."""
        for line in (self._again, self._lines.get(request.client, deque[Request]())):
            if request in line:
                line.remove(request)
                if not line and line is not self._again:
                    del self._lines[request.client]
                return True
        return False
