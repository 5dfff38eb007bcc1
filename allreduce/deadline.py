"""How long a node is waited for."""

from allreduce.base import GroupSpec, Watch
from allreduce.late import Lateness
from tpi.errors import NodeLost
from tpi.system.clocks import PAUSE_S, since_boot


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
