"""What is to be dealt, to whom, and what a sum over some of them costs. Bytes and seconds; nothing is measured here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from tpi.errors import PlanError

Members = tuple[int, ...]
"""Ranks of the nodes that take part, in order; the master, 0, always does."""


@dataclass(frozen=True)
class HomeNode:
    """A node as the split knows it.

    Attributes:
        read: bytes of weights per second, for one token.
        disk: bytes per second from its disk, for what its memory does not hold.
        memory: bytes that it may use; `fixed` of them are taken whatever it holds.
        turn: seconds between two tokens in which it alone computes (the master's head).
    """

    name: str
    read: float
    disk: float
    memory: int
    fixed: int = 0
    turn: float = 0.0


@dataclass(frozen=True)
class DealtUnits:
    """Units of one kind, which are dealt to the nodes.

    Attributes:
        kind: what they are called: `heads`, `neurons`, `experts`, `shared`.
        units: how many each block has.
        blocks: how many blocks have them.
        nbytes: weights of one unit in all blocks together, in memory.
        kept: keys and values of one unit in all blocks, for the whole context.
        read: bytes of weights, keys and values that a token reads of one unit in all blocks, on average.
    """

    kind: str
    units: int
    blocks: int
    nbytes: float
    read: float
    kept: float = 0.0


@dataclass(frozen=True)
class HomeProblem:
    """Nodes, the master first; what is dealt; and the seconds of all sums of a token among some of the nodes.

    Raises:
        PlanError: if a node neither reads nor loads anything.
    """

    nodes: tuple[HomeNode, ...]
    dealt: tuple[DealtUnits, ...]
    exchange: Callable[[Members], float]

    def __post_init__(self) -> None:
        for node in self.nodes:
            if not (node.read > 0 and node.disk > 0):
                raise PlanError(f"{node.name} was measured to compute nothing; measure it again with --remeasure")

    @cached_property
    def sums(self) -> Callable[[Members], float]:
        """`exchange`, asked once for each set of nodes."""
        return cache(self.exchange)

    @cached_property
    def read(self) -> float:
        """Bytes that a token reads of the whole model."""
        return sum(each.units * each.read for each in self.dealt)

    def bound(self, members: Members) -> float:
        """Seconds that a token takes these nodes at least: as if units were infinitely small and memory free."""
        together = sum(self.nodes[rank].read for rank in members)
        return self.read / together + self.sums(members) + self.nodes[0].turn


@dataclass(frozen=True)
class Dealing:
    """Who holds what: `units[kind]` for each of `members`, and the seconds of a token by what they go to.

    `compute` includes the master's turn; `disk` is what is waited for it beside computing and sums.
    """

    members: Members
    units: dict[str, tuple[int, ...]]
    compute: float
    exchange: float
    disk: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a token."""
        return self.compute + self.exchange + self.disk
