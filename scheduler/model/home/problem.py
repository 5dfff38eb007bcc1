"""The problem of splitting a model: the units, the nodes, and the time of a sum over some of the nodes.

Bytes and seconds; nothing is measured here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf

from tpi.errors import PlanError

Members = tuple[int, ...]
"""The ranks of the nodes that take part, in order; the master, rank 0, always does."""


@dataclass(frozen=True)
class HomeNode:
    """The figures of a node that decide its part of the split.

    Attributes:
        name: the node's name in errors.
        read: bytes of weights per second, for one token.
        disk: bytes per second from its disk, for weights that do not fit into its memory.
        memory: bytes that it may use.
        fixed: bytes of `memory` that are used whatever units it holds.
        turn: seconds between two tokens in which no other node computes; for the master, the time of the head.
        operations: floating-point operations per second, for many tokens at once.
    """

    name: str
    read: float
    disk: float
    memory: int
    fixed: int = 0
    turn: float = 0.0
    operations: float = inf


@dataclass(frozen=True)
class UnitKind:
    """The units of one kind, which are divided among the nodes.

    Attributes:
        kind: `heads`, `neurons`, `experts` or `shared`.
        units: how many units each block has.
        blocks: how many blocks have such units.
        nbytes: bytes in memory of one unit's weights, in all blocks together.
        read: bytes of weights, keys and values that a token reads of one unit in all blocks, on average.
        kv_bytes: bytes of one unit's keys and values in all blocks, for the whole context.
    """

    kind: str
    units: int
    blocks: int
    nbytes: float
    read: float
    kv_bytes: float = 0.0

    @property
    def read_from_disk(self) -> float:
        """Share of this kind's weights on disk that a token reads: 1, except for experts (the chosen ones)."""
        return min(1.0, self.read / self.nbytes) if self.nbytes else 1.0


@dataclass(frozen=True)
class HomeProblem:
    """A model to divide among nodes: the nodes, the master first, and the kinds of units.

    `exchange` takes the ranks of some nodes; it returns the seconds of all sums over these nodes for one token.

    Raises:
        PlanError: if the speed of a node's memory or disk is not above 0.
    """

    nodes: tuple[HomeNode, ...]
    kinds: tuple[UnitKind, ...]
    exchange: Callable[[Members], float]

    def __post_init__(self) -> None:
        for node in self.nodes:
            if not (node.read > 0 and node.disk > 0):
                raise PlanError(f"{node.name} has a measured speed of 0; measure it again with --remeasure")

    @cached_property
    def sums(self) -> Callable[[Members], float]:
        """The function `exchange` with a cache, so that it is called only once for each set of nodes."""
        return cache(self.exchange)

    @cached_property
    def read(self) -> float:
        """Bytes of the whole model that a token reads."""
        return sum(each.units * each.read for each in self.kinds)

    def bound(self, members: Members) -> float:
        """Return a lower bound of a token's seconds on the nodes `members`, as if memory were unlimited and units
        divisible.
        """
        together = sum(self.nodes[rank].read for rank in members)
        return self.read / together + self.sums(members) + self.nodes[0].turn


@dataclass(frozen=True)
class HomeSplit:
    """A split of units over `members`: `units[kind]` has each member's number, and three parts of a token's seconds.

    `compute` includes the master's turn; `disk` is the time spent waiting for a disk in addition to computing and sums.
    """

    members: Members
    units: dict[str, tuple[int, ...]]
    compute: float
    exchange: float
    disk: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a token."""
        return self.compute + self.exchange + self.disk
