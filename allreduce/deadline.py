"""Deadlines of waits for a node, and detection of late messages, which tells a broken link from a slow node.

Times are `tpi.system.clocks.since_boot` seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from allreduce.base import GroupSpec, Watch
from tpi.errors import NodeLost
from tpi.system.clocks import PAUSE_S, since_boot

MISSING_S = 3.5  # seconds after which a message of a few kilobytes is late, unless earlier waits took long
SLOWEST = 125e3  # lowest assumed bandwidth of a link, in bytes per second (1 Mbit/s)
_LONGEST, _USUAL = 3, 16  # a message is not late before this many times the longest, and the usual, wait
_WEIGHT, _FORGET = 0.1, 0.98  # weight of the last wait in the mean wait; factor by which each wait shrinks the longest
# longest time in seconds between two calls of `look` during a wait; after a longer gap no thread is waiting
_GAP_S = 0.45


@dataclass
class Lateness:
    """A record of how long this node has waited for a message.

    The waiting thread calls `look`; any thread may call `rank`.
    """

    limit_s: float = MISSING_S  # for messages of the current step
    usual_s: float = 0.0
    longest_s: float = 0.0
    _rank: int = -1
    _since: float = 0.0
    _looked: float = 0.0

    def expect(self, nbytes: int) -> None:
        """Set the limit for a step in which each sum brings this node `nbytes` bytes."""
        self.limit_s = MISSING_S + nbytes / SLOWEST

    def look(self, rank: int, begins: bool, now: float) -> None:
        """Record that at time `now` no message of `rank` has come yet. `begins` is True at the start of a wait."""
        if begins:
            self._end()
            self._rank, self._since = rank, now
        elif now - self._looked > PAUSE_S:  # this process was stopped; that time does not count
            self._since += now - self._looked
        self._looked = now

    def rank(self, now: float) -> int:
        """Return the rank of the node that this node waits for, if its message is late at time `now`, or else -1."""
        limit = max(self.limit_s, _LONGEST * self.longest_s, _USUAL * self.usual_s)
        return self._rank if now - self._looked < _GAP_S and now - self._since > limit else -1

    def _end(self) -> None:
        took = self._looked - self._since
        self.longest_s = max(self.longest_s * _FORGET, took)
        self.usual_s += _WEIGHT * (took - self.usual_s)


class Deadlines:
    """Deadlines of one node's waits for all other nodes.

    Times are `since_boot` seconds, without those in which this process was stopped.
    """

    def __init__(
        self,
        spec: GroupSpec,
        watch: Watch | None,
        lateness: Lateness | None = None,
        awaited: Callable[[int], int] | None = None,
    ) -> None:
        """Create the deadlines of the nodes of `spec`; the other arguments are as in `Endpoints`."""
        self._spec = spec
        self._watch = watch
        self._lateness = lateness
        self._awaited = awaited
        self._looked = 0.0

    def __call__(self, rank: int, deadline: float) -> float:
        """Return the new deadline of a wait for `rank`, given the old `deadline`, which is 0 at first.

        A waiting mailbox calls this several times a second while nothing is received.

        Raises:
            NodeLost: if the deadline has passed, and `watch` sees no progress of node `rank`, or of the node that it
                waits for. The error names the latter.
        """
        if self._lateness:
            self._lateness.look(rank, not deadline, since_boot())
        if self._awaited:
            rank = self._awaited(rank)
        paused = since_boot() - self._looked
        progress = self._watch is not None and self._watch(rank)
        self._looked = now = since_boot()
        if progress or not deadline:
            return now + self._spec.timeout_s
        if paused > PAUSE_S:
            deadline += paused
        if now < deadline:
            return deadline
        name = self._spec.peers[rank].name
        raise NodeLost(
            name,
            f"{name} (rank {rank}) did not answer for {self._spec.timeout_s:g} s during a sum; "
            "check that it is running and can be reached, then start again",
        )
