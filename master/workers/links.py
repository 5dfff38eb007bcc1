"""Broken links between workers: nodes that wait for each other for ever although every node runs.

A node waits patiently for another that computes. But if nodes wait in a circle for longer than any message takes, or
one waits for a node that is done, then a link delivers nothing. The master detects that from heartbeats alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from master.workers.remote import RemoteWorker
from tpi.errors import NodeLost

CONFIRMED_S = 0.6  # seconds for which a pattern has to last: two heartbeats of every node
APART_S = 60.0  # seconds until a worker that another worker could not reach is called again


class LinkBrokenError(NodeLost):
    """Error for a running worker that another worker cannot reach."""


def broken_link(missed: Sequence[int], done: Sequence[bool]) -> tuple[int, int] | None:
    """Return (the worker that waits, the worker whose messages do not arrive), or None if no link is broken.

    A link is broken if nodes wait in a circle, or a node waits for another that is done with the step. `missed` has the
    rank for which each rank waits (-1: none), `done` which ranks are done. A circle of the master and one worker is not
    reported: heartbeats cover that link.
    """
    for start in range(1, len(missed)):
        path = [start]
        while 0 <= (after := missed[path[-1]]) < len(missed) and after not in path:
            path.append(after)
        before_done = path[:-1][-1:] if done[path[-1]] else []
        waits = path[path.index(after) :] if after in path else before_done
        links = [(rank, missed[rank]) for rank in waits if rank and missed[rank]]
        if links:
            return max(links, key=lambda link: link[1])
    return None


def last_awaited(rank: int, missed: Sequence[int]) -> int:
    """Return the rank at the end of the chain of waits that begins at `rank`: that node computes.

    `missed` has the rank for which each worker waits, rank 1 first (-1: none). A wait for the master, or in a circle,
    ends the chain.
    """
    path = [rank]
    while 0 < (after := missed[path[-1] - 1]) <= len(missed) and after not in path:
        path.append(after)
    return path[-1]


@dataclass
class LinkWatch:
    """The current pattern of waiting nodes, and since when it has lasted. Times in `since_boot` seconds."""

    _found: tuple[int, int] | None = None
    _since: float = 0.0

    def look(self, missed: Sequence[int], done: Sequence[bool], now: float) -> tuple[int, int] | None:
        """Return the result of `broken_link` once it has lasted long enough, else None."""
        found = broken_link(missed, done)
        if found != self._found:
            self._found, self._since = found, now
        return found if found and now - self._since >= CONFIRMED_S else None

    def judge(self, workers: Sequence[RemoteWorker], missed: int, now: float) -> None:
        """Check that every link between workers delivers; the master waits for rank `missed` (-1: none).

        Raises:
            LinkBrokenError: naming the worker to leave out.
        """
        step = max((worker.heartbeats.step for worker in workers), default=0)
        done = [False, *(worker.heartbeats.done(step) for worker in workers)]
        if found := self.look([missed, *(worker.heartbeats.missed for worker in workers)], done, now):
            waits, lost = (workers[rank - 1] for rank in found)
            raise LinkBrokenError(
                lost.name,
                f"worker {lost.name} is lost to worker {waits.name}: both run, but nothing gets from one to the other; "
                "check that no firewall is between them, then start again",
            )
