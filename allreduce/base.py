"""What a collective is: a group of nodes that sum one float32 array each, and the table of the ways to do it.

Nothing here knows sockets beyond carrying them: `transport` connects, its mailbox moves messages, and one module per
algorithm moves sums.
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

from allreduce.flight import IN_FLIGHT, Exchange, Flight
from tpi.errors import PlanError, UsageError

if TYPE_CHECKING:
    from allreduce.algorithms.loopback import Board
    from allreduce.deadline import Lateness
    from tpi.net.monitor import Socket
    from tpi.net.sockets import Net

F32 = npt.NDArray[np.float32]

Work = Callable[[int], object]
"""Called with 1, computes one block of a prefill step as this node would; with n, for an n-th of its tokens."""

Watch = Callable[[int], bool]
"""Called about ten times a second with the rank waited for. True: that node makes progress, so its deadline moves on.
It may raise to end the wait (an abort from the master)."""


def idle(parts: int) -> None:
    """No work."""


@dataclass(frozen=True)
class Peer:
    """A node of the group. Rank 0, the master, binds nothing: its `address` is that of shared memory, or empty."""

    rank: int
    name: str  # under which the user knows the node; errors show it
    address: str = ""  # of its collective socket, for example tcp://192.168.1.7:9991
    key: bytes = b""  # that it has to prove to own; empty: none, on this machine alone


@dataclass(frozen=True)
class GroupSpec:
    """Everything that the nodes of a group agree on, and which of them this node is.

    `session` (64 bits, random, one per master run) and `epoch` (one per plan) fence the group: frames that carry others
    are dropped. A wait fails after `timeout_s` without progress of the node waited for.
    """

    rank: int
    session: int
    epoch: int
    peers: tuple[Peer, ...]  # all nodes in rank order, this node included
    wire: str = "f32"
    timeout_s: float = 10.0
    spin_us: int = 0  # how long a wait polls before it sleeps; 0 where nodes have no cores of their own
    payload_values: tuple[int, int] = (4096, 128 * 4096)  # of one decode and one prefill sum: what "auto" chooses for

    def __post_init__(self) -> None:
        if [peer.rank for peer in self.peers] != list(range(len(self.peers))):
            raise PlanError("the peers of a group must be listed in rank order, each once")
        if not 0 <= self.rank < len(self.peers):
            raise PlanError(f"rank {self.rank} is not one of the group's {len(self.peers)}")

    @property
    def size(self) -> int:
        """Number of nodes in the group."""
        return len(self.peers)


@dataclass(frozen=True)
class Endpoints:
    """What a node hands to its groups. The owner of `router` closes it; groups close what they connect.

    `net` and `router` (bound on the COLLECTIVE plane; None on rank 0) are for the collectives over ZeroMQ, `board` is
    for the in-process one.
    """

    net: "Net | None" = None
    router: "Socket | None" = None
    watch: Watch | None = None
    lateness: "Lateness | None" = None  # told of every wait
    board: "Board | None" = None
    links_cache: Path | None = None  # where the master keeps what it measured of links; None: nowhere


@dataclass
class GroupStats:
    """Sums since the group was opened."""

    exchanges: int = 0
    seconds: float = 0.0  # inside sums, waiting for slower nodes included
    sent_bytes: int = 0  # headers included
    received_bytes: int = 0
    dropped: int = 0  # frames that were malformed, stale, or of another session or epoch


class Group(ABC):
    """One node's handle on a group. Every node calls the same methods in the same order with equal shapes.

    Sums take C-contiguous `[tokens, hidden]` float32 and raise NodeLost, naming the node, when a peer does not answer
    within its deadline. A group that has raised is of no further use but to be closed.
    """

    name: str

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.size = spec.size
        self.wire = spec.wire
        self._stats = GroupStats()
        self._flying = deque[Flight]()

    def allreduce(self, partial: F32) -> F32:
        """The sum of all nodes' `partial`, on every node; valid until the next sum is finished."""
        return self._run(partial, self._allreduce)

    def reduce(self, partial: F32) -> F32 | None:
        """The sum on rank 0, None elsewhere; valid until the next sum is finished."""
        total = self._run(partial, self._reduce)
        return None if self.rank else total

    def start(self, partial: F32, everywhere: bool = True) -> None:
        """Send what can be sent of a sum; it travels while the caller does something else, until `finish`.

        `partial` must not change until then. At most `IN_FLIGHT` sums may be on their way.

        Args:
            everywhere: an allreduce; else a reduce, whose sum is only there on rank 0.
        """
        started = perf_counter()
        if len(self._flying) == IN_FLIGHT:
            raise RuntimeError(f"{IN_FLIGHT} sums are on their way; finish one first")
        exchange = self._allreduce(partial) if everywhere else self._reduce(partial)
        flight = Flight(exchange, partial.shape, everywhere or self.rank == 0)
        flight.resume()
        self._flying.append(flight)
        self._stats.seconds += perf_counter() - started

    def finish(self) -> F32 | None:
        """The oldest sum that was started; None if it is not for this node. Valid until the next is finished."""
        started = perf_counter()
        flight = self._flying.popleft()
        if (total := flight.resume()) is None:  # it waits for what takes as long to come as what the others wait for
            for other in self._flying:
                other.resume()
        while total is None:
            total = flight.resume()
        self._stats.exchanges += 1
        self._stats.seconds += perf_counter() - started
        return total.reshape(flight.shape) if flight.here else None

    @property
    def stats(self) -> GroupStats:
        """Sums since the group was opened."""
        return self._stats

    @property
    def overlaps(self) -> bool:
        """Whether a sum travels while its nodes compute: then it pays to have another one under way."""
        return False

    @property
    def trivial(self) -> bool:
        """Whether a partial is its own sum, and nobody is waited for."""
        return False

    def tune(self, work: Work = idle) -> object:
        """Decide what is to be decided by measuring, before the first sum; every node calls it. Mostly nothing.

        `work` is done between the sums that are timed, as it will be between those that count.
        """
        return None

    def algorithm(self, values: int) -> str:
        """Name of the algorithm that sums `values` values."""
        return self.name

    def predicted_s(self, values: int) -> float | None:
        """Seconds that a sum of `values` values should take, None if the links were not measured."""
        return None

    def choice_fields(self) -> dict[str, Any] | None:
        """What the algorithms were chosen by, see `allreduce.choose.Choice.fields`; None where nothing was chosen."""
        return None

    def begin(self, step: int) -> None:
        """Start step number `step`; steps only ever increase. Sums and frames of earlier steps are dropped."""
        self._flying.clear()
        self._begin(step)

    @abstractmethod
    def close(self) -> None:
        """Release what the group opened. May be called twice.

        Only when all nodes are done, as they are when the master has the result of a reduce: what is still on its way
        to a slow node may be lost.
        """

    def _run(self, partial: F32, algorithm: Callable[[F32], Exchange]) -> F32:
        """A sum from start to end, while nothing else is done: what most of them are, so in few steps."""
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
        """See `begin`."""

    @abstractmethod
    def _allreduce(self, values: F32) -> Exchange:
        """The sum of all nodes' `values`, an array of their shape or a 1-D one."""

    @abstractmethod
    def _reduce(self, values: F32) -> Exchange:
        """As `_allreduce`; what it returns matters on rank 0 only."""


GROUPS = {  # module and class, imported when opened
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
    """Arrays as long as a payload, in float32, that a sum takes beside the partial: for the memory budget.

    Over sockets: the sum, its encoding, what others decode, and one to send and one to receive per other node.
    """
    if size == 1:
        return 0
    return 1 if name == "shared" else 3 + 2 * (size - 1)


def group_names() -> tuple[str, ...]:
    """Names that `open_group` accepts."""
    return tuple(GROUPS)


def open_group(name: str, spec: GroupSpec, endpoints: Endpoints) -> Group:
    """Join the group with the algorithm called `name`; a single node always gets `loopback`.

    Raises:
        UsageError: if there is no such algorithm.
    """
    if name not in GROUPS:
        raise UsageError(f"unknown collective {name!r}; choose one of {', '.join(GROUPS)}")
    module, kind = GROUPS["loopback" if spec.size == 1 else name].split(":")
    group: Group = getattr(import_module(module), kind)(spec, endpoints)
    return group
