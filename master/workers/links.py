"""Links between workers that are broken: nodes wait for each other, though each of them lives.

Who waits for a node that computes is patient. Where each node of a circle waits for the next for longer than any
message takes, or one waits for a node that is done, a link brings nothing. The master hears that from heartbeats alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from master.workers.remote import RemoteWorker
from tpi.errors import NodeLost

CONFIRMED_S = 0.6  # for which that has to stand: two heartbeats of everybody
APART_S = 60.0  # until a worker that another could not reach is called again


class LinkBrokenError(NodeLost):
    """A worker that lives is not reached by another."""


def broken_link(missed: Sequence[int], done: Sequence[bool]) -> tuple[int, int] | None:
    """Which worker misses messages of which that has sent them all.

    That is so where nodes wait in a circle, or for one that is done with the step. `missed` has whom each rank misses
    (-1: nobody), `done` who is done. Of a circle of the master and one worker nothing is said: heartbeats tell of them.
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


@dataclass
class Circles:
    """Since when nodes have been waiting in the same way. Times in `since_boot` seconds."""

    _found: tuple[int, int] | None = None
    _since: float = 0.0

    def look(self, missed: Sequence[int], done: Sequence[bool], now: float) -> tuple[int, int] | None:
        """As `broken_link`, once that is certain."""
        found = broken_link(missed, done)
        if found != self._found:
            self._found, self._since = found, now
        return found if found and now - self._since >= CONFIRMED_S else None

    def judge(self, workers: Sequence[RemoteWorker], missed: int, now: float) -> None:
        """Whether every link between workers brings what is sent; the master misses the rank `missed` (-1: nobody).

        Raises:
            LinkBrokenError: naming who is to be left out.
        """
        step = max((worker.heartbeats.step for worker in workers), default=0)
        done = [False, *(worker.heartbeats.done(step) for worker in workers)]
        if found := self.look([missed, *(worker.heartbeats.missed for worker in workers)], done, now):
            waits, lost = (workers[rank - 1] for rank in found)
            raise LinkBrokenError(
                lost.name,
                f"worker {lost.name} is lost to worker {waits.name}: both run, but nothing gets from one to the other; "
                "check that it can be reached from there, then start again",
            )
