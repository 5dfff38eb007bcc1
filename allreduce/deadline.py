"""How long a node is waited for, and whose message is late: what tells a broken link from a node that is slow.

Times are `tpi.system.clocks.since_boot` seconds.
"""

from dataclasses import dataclass

from allreduce.base import GroupSpec, Watch
from tpi.errors import NodeLost
from tpi.system.clocks import PAUSE_S, since_boot

MISSING_S = 3.5  # a message of a few kilobytes is late after that, on a link that was not seen to take long
SLOWEST = 125e3  # bytes per second that a link is trusted to bring at least: 1 Mbit/s
_LONGEST, _USUAL = 3, 16  # times the longest wait that ended, and the usual one
_WEIGHT, _FORGET = 0.1, 0.98  # of the last wait in the usual one; per wait, of the longest
_GAP_S = 0.45  # between two looks of one wait; who looks less often does something else


@dataclass
class Lateness:
    """The wait of now. `look` belongs to the thread that waits, `rank` may be read by another."""

    limit_s: float = MISSING_S  # for the messages of the step that runs
    usual_s: float = 0.0
    longest_s: float = 0.0
    _rank: int = -1
    _since: float = 0.0
    _looked: float = 0.0

    def expect(self, nbytes: int) -> None:
        """A step begins whose sums bring this node so many bytes each."""
        self.limit_s = MISSING_S + nbytes / SLOWEST

    def look(self, rank: int, begins: bool, now: float) -> None:
        """Nothing has come from `rank` yet; `begins`: this is the first look of a wait."""
        if begins:
            self._end()
            self._rank, self._since = rank, now
        elif now - self._looked > PAUSE_S:  # this process stood still, which is nobody's fault
            self._since += now - self._looked
        self._looked = now

    def rank(self, now: float) -> int:
        """Whose message is late, though this node waits for nothing else; -1 if none is."""
        limit = max(self.limit_s, _LONGEST * self.longest_s, _USUAL * self.usual_s)
        return self._rank if now - self._looked < _GAP_S and now - self._since > limit else -1

    def _end(self) -> None:
        took = self._looked - self._since
        self.longest_s = max(self.longest_s * _FORGET, took)
        self.usual_s += _WEIGHT * (took - self.usual_s)


class Patience:
    """Of one node, with all others. Times are `since_boot` seconds, less those in which this process stood still."""

    def __init__(self, spec: GroupSpec, watch: Watch | None, lateness: Lateness | None = None) -> None:
        self._spec = spec
        self._watch = watch
        self._lateness = lateness
        self._looked = 0.0

    def __call__(self, rank: int, deadline: float) -> float:
        """The deadline (0: none yet) of a wait for `rank` that got nothing so far. Asked several times a second.

        Raises:
            NodeLost: if it has passed, and `watch` sees no progress of that node.
        """
        if self._lateness:
            self._lateness.look(rank, not deadline, since_boot())
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
