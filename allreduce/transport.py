"""Exchange of messages between the nodes of one group, through a mailbox on the node's connections.

Messages of a step are numbered in the order in which the algorithm, the same on every node, uses them. A receiver asks
for a message by sender and number. The work per message is done in C++ (`allreduce._mailbox`). This module contains no
algorithm.
"""

from collections.abc import Iterable

from allreduce.base import Endpoints, GroupSpec, GroupStats
from allreduce.connections import STEP_MASK, Connections


class Transport:
    """The messages of one group on one node. Only one thread at a time may use it.

    Algorithms call `box` directly. It sends from and receives into float32 arrays. Its waits raise NodeLost, naming the
    node, when a deadline has passed.
    """

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        """Use the connections of `endpoints`. If it has none, open connections for this group alone."""
        self.spec = spec
        self._shared = endpoints.connections is not None
        self._connections = endpoints.connections or Connections(spec, endpoints)
        self._ranks = [peer.rank for peer in spec.peers]
        self.box = self._connections.open(spec.lane, self._ranks)

    def connect(self, members: Iterable[int]) -> None:
        """Connect to the `members` (ranks in the group) above this node's rank; lower ranks connect to this node."""
        self._connections.connect(self._ranks[member] for member in members)

    def begin(self, step: int) -> None:
        """Begin step number `step`, and drop messages of earlier steps."""
        self.box.begin(step & STEP_MASK)

    def with_traffic(self, stats: GroupStats) -> GroupStats:
        """Set the bytes sent and received and the dropped frames in `stats`, and return `stats`."""
        stats.sent_bytes, stats.received_bytes = self.box.sent_bytes, self.box.received_bytes
        stats.dropped = self._connections.frames.dropped
        return stats

    def close(self) -> None:
        """Close the mailbox. Close the connections too if no other group uses them."""
        self.box.close()
        if not self._shared:
            self._connections.close()
