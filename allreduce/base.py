"""Interface of a collective: a group of nodes that sum one float32 array each; and the table of its implementations.

This module has no socket code. `allreduce.connections` connects nodes; each algorithm has a module.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from allreduce.flight import IN_FLIGHT, Exchange, PendingSum
from tpi.errors import PlanError, UsageError

if TYPE_CHECKING:
    from allreduce.algorithms.loopback import Board
    from allreduce.connections import Connections
    from allreduce.deadline import Lateness
    from tpi.net.monitor import Socket
    from tpi.net.sockets import Net

F32 = npt.NDArray[np.float32]

Work = Callable[[int], object]
"""Callback for tuning.

Called with 1, it computes one block of a prefill step; with n, it computes that block for an n-th of the tokens.
"""

Watch = Callable[[int], bool]
"""Called about ten times a second with the rank that a wait is for.

Returns True if that node makes progress; its deadline is then moved. It may raise an exception to end the wait, for
example after an abort by the master.
"""


def idle(parts: int) -> None:
    """Do nothing. This is the `Work` for tuning a group without computing between sums."""


@dataclass(frozen=True)
class Peer:
    """A node of the deployment.

    Rank 0, the master, does not listen: its `address` is that of shared memory, or is empty.
    """

    rank: int
    name: str  # the name by which the user knows the node; errors show it
    address: str = ""  # address of its collective socket, for example tcp://192.168.1.7:9991
    # public key that the node must prove to own; empty: no proof, which is only for nodes on this machine
    key: bytes = b""


@dataclass(frozen=True)
class GroupSpec:
    """Settings that the nodes of a group agree on, and the rank of this node in the group: its position in `peers`.

    Frames with another `session` (64 bits, random, one per run of a master) or `epoch` (one per plan) are dropped. A
    wait fails after `timeout_s` seconds without progress of the node waited for.
    """

    rank: int
    session: int
    epoch: int
    peers: tuple[Peer, ...]  # the nodes of the group by their rank in the deployment, this node included
    wire: str = "f32"
    timeout_s: float = 10.0
    spin_us: int = 0  # time in microseconds for which a wait polls before it sleeps; 0 if nodes share cores
    payload_values: tuple[int, int] = (4096, 128 * 4096)  # numbers of values in a decode and a prefill sum, for "auto"
    lane: int = 0  # number (0 to 63) that separates the group's messages from others on the node's connections

    def __post_init__(self) -> None:
        ranks = [peer.rank for peer in self.peers]
        if ranks != sorted(set(ranks)):
            raise PlanError("the peers of a group must be listed in rank order, each once")
        if not 0 <= self.rank < len(self.peers):
            raise PlanError(f"rank {self.rank} is not a rank of a group of {len(self.peers)} nodes")

    @property
    def size(self) -> int:
        """Number of nodes in the group."""
        return len(self.peers)


@dataclass(frozen=True)
class Endpoints:
    """Resources that a node gives to its groups.

    The owner of `router` closes it; groups close the connections that they open.

    `net` and `router` (bound on the COLLECTIVE plane; None on rank 0) are for the collectives over ZeroMQ, `board` is
    for the in-process one.
    """

    net: "Net | None" = None
    router: "Socket | None" = None
    watch: Watch | None = None
    awaited: Callable[[int], int] | None = None  # returns the rank that node `rank` waits for, or `rank` itself
    lateness: "Lateness | None" = None  # records every wait
    board: "Board | None" = None
    connections: "Connections | None" = None  # the node's connections, if its groups share them
    links_cache: Path | None = None  # file in which the master stores measured links; None: store nothing


@dataclass
class GroupStats:
    """Totals of a group since it was opened."""

    exchanges: int = 0
    seconds: float = 0.0  # time inside sums, including waits for slower nodes
    sent_bytes: int = 0  # headers included
    received_bytes: int = 0
    dropped: int = 0  # frames that were malformed, stale, or of another session or epoch


class Group(ABC):
    """One node's handle on a group. Every node calls the same methods in the same order with equal shapes.

    Sums take C-contiguous float32 arrays `[tokens, hidden]`. They raise NodeLost, naming the node, if a peer does not
    answer within its deadline. After an exception the group can only be closed.
    """

    name: str

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.size = spec.size
        self.wire = spec.wire
        self._stats = GroupStats()
        self._pending = deque[PendingSum]()

    def allreduce(self, partial: F32) -> F32:
        """Return the sum of all nodes' `partial`, on every node. The result is valid until the next sum is finished."""
        return self._run(partial, self._allreduce)

    def reduce(self, partial: F32) -> F32 | None:
        """Return the sum of all nodes' `partial` on rank 0, and None on other ranks.

        The result is valid until the next sum is finished.
        """
        total = self._run(partial, self._reduce)
        return None if self.rank else total

    def start(self, partial: F32, everywhere: bool = True) -> None:
        """Start a sum: send what can be sent without waiting.

        The sum continues while the caller computes, until `finish` returns it. `partial` must not change in the
        meantime. At most `IN_FLIGHT` sums may be under way.

        Args:
            partial: this node's partial result, `[tokens, hidden]`.
            everywhere: True for an allreduce; False for a reduce, whose sum is available on rank 0 only.

        Raises:
            RuntimeError: if `IN_FLIGHT` sums are under way.
            NodeLost: if a peer does not answer within its deadline.
        """
        started = perf_counter()
        if len(self._pending) == IN_FLIGHT:
            raise RuntimeError(f"{IN_FLIGHT} sums are under way, the most that are allowed; call finish() first")
        exchange = self._allreduce(partial) if everywhere else self._reduce(partial)
        flight = PendingSum(exchange, partial.shape, everywhere or self.rank == 0)
        flight.resume()
        self._pending.append(flight)
        self._stats.seconds += perf_counter() - started

    def finish(self) -> F32 | None:
        """Wait for the oldest sum under way and return it. Return None if it was a reduce and this is not rank 0.

        The result is valid until the next sum is finished.
        """
        started = perf_counter()
        flight = self._pending.popleft()
        if (total := flight.resume()) is None:
            # let the other sums progress while messages of this one are on their way
            for other in self._pending:
                other.resume()
        while total is None:
            total = flight.resume()
        self._stats.exchanges += 1
        self._stats.seconds += perf_counter() - started
        return total.reshape(flight.shape) if flight.for_this_node else None

    @property
    def stats(self) -> GroupStats:
        """Totals since the group was opened."""
        return self._stats

    @property
    def overlaps(self) -> bool:
        """True if a sum makes progress while its nodes compute, so that a second sum under way saves time."""
        return False

    @property
    def trivial(self) -> bool:
        """True if the group has one node, whose partial result is already the sum."""
        return False

    def tune(self, work: Work = idle) -> object:
        """Time sums in order to choose an algorithm. Most groups have nothing to choose and do nothing.

        Every node must call this before the first sum. `work` is called between the timed sums, as nodes compute
        between real ones.
        """
        return None

    def algorithm(self, values: int) -> str:
        """Return the name of the algorithm that sums arrays of `values` numbers."""
        return self.name

    def predicted_s(self, values: int) -> float | None:
        """Return the predicted seconds to sum arrays of `values` numbers, or None if the links were not measured."""
        return None

    def choice_fields(self) -> dict[str, Any] | None:
        """Return the measurements behind the choice (`allreduce.choose.Choice.fields`), or None without a choice."""
        return None

    def begin(self, step: int) -> None:
        """Start step number `step`. Step numbers only increase. Sums and frames of earlier steps are dropped."""
        self._pending.clear()
        self._begin(step)

    @abstractmethod
    def close(self) -> None:
        """Close the connections and free the buffers of the group. Further calls do nothing.

        Call this only when all nodes are done, for example after the master has the result of a reduce. Messages on
        their way to a slow node may be lost.
        """

    def _run(self, partial: F32, algorithm: Callable[[F32], Exchange]) -> F32:
        """Return the sum of all nodes' `partial`, waiting for it at once. Most sums take this path, so it is short."""
        started = perf_counter()
        exchange = algorithm(partial)
        try:
            while True:
                next(exchange)
        except StopIteration as done:
            total: F32 = done.value
        self._stats.exchanges += 1
        self._stats.seconds += perf_counter() - started
        return total if total.shape == partial.shape else total.reshape(partial.shape)

    @abstractmethod
    def _begin(self, step: int) -> None:
        """Start step number `step`: drop messages of earlier steps."""

    @abstractmethod
    def _allreduce(self, values: F32) -> Exchange:
        """Return a generator that sums the `values` of all nodes, and yields wherever it would wait for other nodes.

        The sum has the shape of `values` or is 1-D.
        """

    @abstractmethod
    def _reduce(self, values: F32) -> Exchange:
        """Return a generator like that of `_allreduce`, whose result is used on rank 0 only."""


GROUPS = {  # module and class, imported when a group is opened
    "auto": "allreduce.auto:Auto",
    "star": "allreduce.algorithms.star:Star",
    "mesh": "allreduce.algorithms.mesh:Mesh",
    "two-shot": "allreduce.algorithms.twoshot:TwoShot",
    "tree": "allreduce.algorithms.tree:Tree",
    "ring": "allreduce.algorithms.ring:RingGroup",
    "shared": "allreduce.algorithms.shared:Shared",
    "loopback": "allreduce.algorithms.loopback:Loopback",
    "torch": "allreduce.algorithms.torchdist:TorchDistributed",
}


def arrays_to_sum(name: str, size: int) -> int:
    """Return how many buffers of the payload's size in float32 a sum needs in addition to the partial result.

    The memory budget includes these buffers. Over sockets there are buffers for the sum, its encoding, the decoded
    values, and two for each other node: one to send and one to receive.
    """
    if size == 1:
        return 0
    return 1 if name == "shared" else 3 + 2 * (size - 1)


def group_names() -> tuple[str, ...]:
    """Return the names that `open_group` accepts."""
    return tuple(GROUPS)


def open_group(name: str, spec: GroupSpec, endpoints: Endpoints) -> Group:
    """Join the group with the algorithm called `name`. A single node always gets `loopback`.

    Raises:
        UsageError: if `name` is not one of `group_names()`.
    """
    if name not in GROUPS:
        raise UsageError(f"unknown collective {name!r}; choose one of {', '.join(GROUPS)}")
    module, kind = GROUPS["loopback" if spec.size == 1 else name].split(":")
    group: Group = getattr(import_module(module), kind)(spec, endpoints)
    return group
