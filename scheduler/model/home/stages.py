"""The cost of stages: runs of layers, each held by a group of nodes, and the seconds of a step through all of them.

A step of r tokens takes in each stage

    compute   of the slowest node: bytes / read speed for one token, more for several (`_ROWS`), and from 17 tokens on
              operations / speed if that is longer
    sums      the stage's allreduces, over the links of its own group only
    disk      the time by which a node's disk takes longer than that to read the weights that do not fit into memory;
              reading them during other stages gains nothing, because it takes memory from resident weights
    hop       the transfer of hidden states from the stage before, or from the master

In addition, it takes the hop back to the master. Several streams, or the chunks of a prompt, are in different stages at
once, so that the slowest stage decides (PipeInfer, 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil

from scheduler.model.home.problem import HomeNode, HomeProblem, HomeSplit, Members, UnitKind
from scheduler.model.sizes import LONGEST_CHUNK, STAGE_CHUNK
from tpi.errors import PlanError

MASTER = 0
_ROWS = ((1, 1.0), (2, 1.09), (3, 1.2), (4, 1.3), (6, 1.87), (8, 2.3), (12, 3.3), (16, 4.35))
"""Tokens of a step, and its computing time in times of one token's: measured with q4 weights on AVX-512."""
_MOST_DRAFTS = _ROWS[-1][0] - 1


@dataclass(frozen=True)
class LayerWork:
    """The units of one layer, the number of its allreduces, and the bytes that are not divided among its nodes."""

    kinds: tuple[UnitKind, ...]
    sums: int
    everywhere: int = 0


@dataclass(frozen=True)
class StageProblem:
    """A model that may be divided into stages.

    Attributes:
        nodes: the nodes, the master first; `turn` of the master is the time of the head.
        layers: the work of each layer.
        cuts: the layers at which a stage may begin or end, in ascending order, 0 and the number of layers included.
        exchange: takes nodes and a number of tokens; returns the seconds of one allreduce.
        hop: takes a node, nodes and a number of tokens; returns the seconds in which hidden states get there.
        weights_per_byte: number of weights stored in one byte.

    Raises:
        PlanError: if the speed of a node's memory or disk is not above 0.
    """

    nodes: tuple[HomeNode, ...]
    layers: tuple[LayerWork, ...]
    cuts: tuple[int, ...]
    exchange: Callable[[Members, int], float]
    hop: Callable[[int, Members, int], float]
    weights_per_byte: float = 1.0

    def __post_init__(self) -> None:
        for node in self.nodes:
            if not (node.read > 0 and node.disk > 0):
                raise PlanError(f"{node.name} has a measured speed of 0; measure it again with --remeasure")

    @cached_property
    def everyone(self) -> Members:
        """The ranks of all nodes."""
        return tuple(range(len(self.nodes)))

    def part(self, first: int, last: int, members: Members) -> HomeProblem:
        """Return the problem of splitting the layers `[first, last)` over the nodes `members`."""
        layers = self.layers[first:last]
        sums, everywhere = sum(layer.sums for layer in layers), sum(layer.everywhere for layer in layers)
        nodes = [replace(node, fixed=node.fixed + everywhere) for node in self.nodes]
        reading = max(everywhere / self.nodes[rank].read for rank in members)
        turn = reading + (self.nodes[MASTER].turn if MASTER in members else 0.0)
        nodes[MASTER] = replace(nodes[MASTER], turn=turn)
        kinds = tuple(self._together([kind for layer in layers for kind in layer.kinds if kind.kind == name], name)
                      for name in dict.fromkeys(kind.kind for layer in layers for kind in layer.kinds))  # fmt: skip
        return HomeProblem(tuple(nodes), kinds, lambda those: sums * self.exchange(those, 1))

    @staticmethod
    def _together(kinds: list[UnitKind], name: str) -> UnitKind:
        """Return the units of the kind `name` in several layers as one kind: each unit stands for one unit of every
        layer.
        """
        blocks = sum(kind.blocks for kind in kinds)
        nbytes, read, kept = (sum(getattr(kind, what) for kind in kinds) for what in ("nbytes", "read", "kv_bytes"))
        return UnitKind(name, kinds[0].units, blocks, nbytes, read, kept)


@dataclass(frozen=True)
class Stage:
    """The layers `[first, last)`, their split, and the seconds of the hop before them."""

    first: int
    last: int
    split: HomeSplit
    hop: float

    @property
    def seconds(self) -> float:
        """Seconds of one token in this stage, the hop before it excluded."""
        return self.split.seconds


@dataclass(frozen=True)
class Layout:
    """A division of the model into stages, and the seconds of one token.

    `back` is the seconds of the hop to the master. `turn` is the head's seconds if no stage includes them: in a ring,
    or if the master is in no stage.
    """

    problem: StageProblem
    stages: tuple[Stage, ...]
    back: float
    turn: float

    @property
    def members(self) -> Members:
        """The ranks of all nodes that hold layers, in ascending order."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.split.members}))

    @property
    def ring(self) -> bool:
        """True if a node is in several stages."""
        return len(self.members) < sum(len(stage.split.members) for stage in self.stages)

    @property
    def in_flight(self) -> int:
        """Number of steps in flight, each in another stage; 1 in a ring."""
        return 1 if self.ring else len(self.stages)

    @property
    def compute(self) -> float:
        """Seconds that a token spends on computing, the head included."""
        return self.turn + sum(stage.split.compute for stage in self.stages)

    @property
    def exchange(self) -> float:
        """Seconds that a token spends on allreduces."""
        return sum(stage.split.exchange for stage in self.stages)

    @property
    def hops(self) -> float:
        """Seconds of all hops, the hop to the master included."""
        return self.back + sum(stage.hop for stage in self.stages)

    @property
    def disk(self) -> float:
        """Seconds that a token waits for disks."""
        return sum(stage.split.disk for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Seconds of a token of a single stream."""
        return self.compute + self.exchange + self.hops + self.disk

    def streams(self, count: int) -> float:
        """Return the seconds per token when `count` sequences are answered at once.

        The sequences are divided equally among as many steps as can be in flight (`in_flight`), each of which is in
        another stage.
        """
        rows = ceil(count / self.in_flight)
        steps = [self._step(stage, rows) for stage in self.stages]
        return max(self.step(rows) / count, max(steps) / rows)

    def prompt(self, tokens: int) -> float:
        """Return the seconds of a prompt, whose chunks follow one another through the stages."""
        chunk = min(tokens, max(STAGE_CHUNK, LONGEST_CHUNK // self.in_flight))
        one = self.step(chunk)
        after = one if self.ring else max(self._step(stage, chunk) for stage in self.stages)
        return one + (ceil(tokens / chunk) - 1) * after

    def drafted(self, acceptance: float, drafting: float = 0.0) -> float:
        """Return the speed-up of answers by drafted tokens, each of which is right with the probability `acceptance`
        (a).

        To draft a token takes `drafting` seconds. With k drafts, a step takes the time of 1 + k tokens and gives
        (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., 2023). The result is that of the best k. With several stages,
        each draft can also be a step of its own. Then a right draft costs the time between two results, and a wrong one
        the time of a whole step.
        """
        given = {rows: (1 - acceptance**rows) / (1 - acceptance) for rows in range(1, _MOST_DRAFTS + 2)}
        alone = self.step(1)
        between = max(alone / self.in_flight, *(self._step(stage, 1) for stage in self.stages))
        ahead = acceptance * (between + drafting) + (1 - acceptance) * alone
        steps = {rows: self.step(rows) + (rows - 1) * drafting for rows in given}
        return max(self.seconds / ahead, *(tokens * self.seconds / steps[rows] for rows, tokens in given.items()))

    def step(self, rows: int) -> float:
        """Return the seconds of a step of `rows` tokens through all stages."""
        between = sum(
            self._hop(before, stage, rows) for before, stage in zip((None, *self.stages), self.stages, strict=False)
        )
        back = self.problem.hop(self.stages[-1].split.members[0], (MASTER,), rows)
        return sum(self._step(stage, rows) for stage in self.stages) + between + back + self.turn

    def _hop(self, before: Stage | None, stage: Stage, rows: int) -> float:
        source = MASTER if before is None else before.split.members[0]
        return self.problem.hop(source, stage.split.members, rows)

    def _step(self, stage: Stage, rows: int) -> float:
        problem, split = self.problem, stage.split
        sums = sum(layer.sums for layer in problem.layers[stage.first : stage.last])
        exchange = sums * problem.exchange(split.members, rows)
        nodes = [problem.nodes[rank] for rank in split.members]
        calculating = max(2 * problem.weights_per_byte * node.read / node.operations for node in nodes)
        more = rows_cost(rows) if rows <= _ROWS[-1][0] else max(1.0, rows * calculating)
        compute = (split.compute - self._routed(stage, 1)) * more + self._routed(stage, rows)
        read = split.disk + split.compute + split.exchange if split.disk else 0.0
        return max(compute + exchange, read)

    def _routed(self, stage: Stage, rows: int) -> float:
        """Return the seconds to compute the experts of `rows` tokens, each of which chooses its experts at random."""
        split, layers = stage.split, self.problem.layers[stage.first : stage.last]
        kinds = [kind for layer in layers for kind in layer.kinds if kind.kind == "experts"]
        touched = sum(kind.nbytes * (1 - (1 - kind.read_from_disk) ** rows) for kind in kinds)
        counts = zip(split.units.get("experts", ()), split.members, strict=False)
        return max((count * touched / self.problem.nodes[rank].read for count, rank in counts), default=0.0)


def rows_cost(rows: int) -> float:
    """Return the computing time of a step of at most 16 tokens, as a multiple of one token's time."""
    (below, least), (above, most) = next(pair for pair in pairwise(_ROWS) if rows <= pair[1][0])
    return least + (most - least) * (rows - below) / (above - below)
