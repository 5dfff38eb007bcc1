"""The split with the fewest seconds per token: HiGHS divides the units of given nodes, a search picks the nodes.

The unknowns for given nodes are the units of each kind on every node (whole numbers), the seconds of the slowest node
in the blocks of a kind, and the bytes of each kind that do not fit into each node's memory. Each block ends with a sum
over all nodes, so a kind takes as long as its slowest node. Weights that do not fit are read from the node's disk,
ahead of their use, also during sums. A token reads only a part of the experts on a disk, so they are the first to be
left there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from scheduler.model.highs import solve_milp
from scheduler.model.home.problem import HomeProblem, HomeSplit, Members
from tpi.errors import PlanError

F64 = npt.NDArray[np.float64]
_SECONDS = 0.5  # seconds after which the best split found so far is taken
_GAP = 2e-3  # the split's time may exceed the best possible one by this share
_EVERY_SET = 9  # up to so many nodes, every set of nodes is compared
_UNIT = 1e6  # bytes in a MB and microseconds in a second: brings numbers to a size that suits the solver


def best_split(problem: HomeProblem, drop: bool = True) -> HomeSplit:
    """Return the best split over all nodes or, with `drop`, without the nodes that make a token slower.

    Raises:
        PlanError: if no set of nodes has room for the keys and values in addition to the nodes' fixed needs.
    """
    everyone = tuple(range(len(problem.nodes)))
    sets = _sets(problem, everyone) if drop else [everyone]
    best: HomeSplit | None = None
    for members in sorted(sets, key=problem.bound):
        if best is not None and problem.bound(members) >= best.seconds:
            break
        found = split_over(problem, members)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    if best is None:
        raise PlanError("the nodes have too little memory for the keys and values; give a smaller -c or more --memory")
    return best


def proportional(units: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `units` units each node gets, so that the slowest node takes the least time.

    Each node gets its proportional part, rounded down. Each unit that is left goes to the node that then takes the
    least time.
    """
    counts = [int(units * speed / sum(speeds)) for speed in speeds]
    for _ in range(units - sum(counts)):
        counts[min(range(len(speeds)), key=lambda at: (counts[at] + 1) / speeds[at])] += 1
    return counts


def _sets(problem: HomeProblem, everyone: Members) -> list[Members]:
    """Return the sets of nodes among which the best one is searched; every set contains the master.

    Up to `_EVERY_SET` nodes, these are all sets, but only one of several that differ only in the names of nodes. For
    more nodes, one node after the other is left out, each time the one without which `HomeProblem.bound` is least.
    """
    if len(everyone) <= _EVERY_SET:
        every = ((0, *others) for size in everyone for others in combinations(everyone[1:], size))
        return list({_alike(problem, members): members for members in every}.values())
    found = [everyone]
    while len(found[-1]) > 1:
        fewer = (tuple(rank for rank in found[-1] if rank != gone) for gone in found[-1][1:])
        found.append(min(fewer, key=problem.bound))
    return found


def _alike(problem: HomeProblem, members: Members) -> tuple[object, ...]:
    """Return a key of the set `members`, equal for two sets if only the names of their nodes differ."""
    nodes = sorted(astuple(problem.nodes[rank])[1:] for rank in members)
    return (*nodes, problem.sums(members))


def split_over(problem: HomeProblem, members: Members) -> HomeSplit | None:
    """Return the best split over all of the nodes `members`; None if it does not fit into their memories.

    Each kind of unit takes as long as its own slowest node. So if everything fits into memory, or if there is one node,
    the kinds are divided one by one. Otherwise HiGHS divides them together.
    """
    model = _Model(problem, members)
    if (found := model.divided()) is not None:
        return found
    from scipy.optimize import Bounds

    solved = solve_milp(
        model.objective(), integrality=model.integrality(), bounds=Bounds(0, model.upper()),
        constraints=list(model.constraints()), options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )  # fmt: skip
    return None if solved.x is None else model.split(solved.x)


def split_equally(problem: HomeProblem, members: Members) -> HomeSplit | None:
    """Return the split with equal shares for each node; None if a memory cannot hold its keys and values."""
    model, equal = _Model(problem, members), [1.0] * len(members)
    return model.held([proportional(each.units, equal) for each in problem.kinds])


@dataclass(frozen=True)
class _Model:
    """The linear program that divides the units of a problem among `members`.

    Its columns are the units of every kind and node, a time for each kind, the bytes on disk of every kind and node,
    and the token's time.
    """

    problem: HomeProblem
    members: Members

    @property
    def _counts(self) -> tuple[int, int]:
        return len(self.problem.kinds), len(self.members)

    @property
    def _width(self) -> int:
        kinds, nodes = self._counts
        return 2 * kinds * nodes + kinds + 1

    def divided(self) -> HomeSplit | None:
        """Return the split of each kind in proportion to the nodes' speeds.

        Return None if a node's part does not fit into its memory.

        A single node gets everything, and reads the weights that do not fit into its memory from its disk.
        """
        speeds = [self.problem.nodes[rank].read for rank in self.members]
        units = np.array([proportional(each.units, speeds) for each in self.problem.kinds])
        nbytes = np.array([[each.nbytes + each.kv_bytes, each.kv_bytes] for each in self.problem.kinds])
        held, kept = nbytes.T @ units / _UNIT
        rooms = [self._room(rank) for rank in self.members]
        return self.split(units.reshape(-1)) if np.all((kept if len(rooms) == 1 else held) <= rooms) else None

    def held(self, units: Sequence[Sequence[int]]) -> HomeSplit | None:
        """Return the split that gives each node these `units` of each kind, `[kinds][nodes]`.

        Return None if a memory cannot hold its keys and values.
        """
        dealt = np.array(units)
        kept = np.array([each.kv_bytes for each in self.problem.kinds]) @ dealt / _UNIT
        return self.split(dealt.reshape(-1)) if np.all(kept <= [self._room(rank) for rank in self.members]) else None

    def objective(self) -> F64:
        kinds, nodes = self._counts
        weights = np.zeros(self._width)
        weights[kinds * nodes :] = 1e-6
        weights[-1] = 1.0
        return weights

    def integrality(self) -> F64:
        kinds, nodes = self._counts
        whole = np.zeros(self._width)
        whole[: kinds * nodes] = 1
        return whole

    def upper(self) -> F64:
        kinds, nodes = self._counts
        most = np.full(self._width, np.inf)
        most[: kinds * nodes] = np.repeat([each.units for each in self.problem.kinds], nodes)
        return most

    def constraints(self) -> Iterator[object]:
        from scipy.optimize import LinearConstraint

        problem, (kinds, nodes) = self.problem, self._counts
        sums, slowest, held, loads = [], [], [], []
        units = [each.units for each in problem.kinds]
        for kind in range(kinds):
            sums.append(self._row({self._at(kind, node): 1.0 for node in range(nodes)}))
            for node, rank in enumerate(self.members):
                seconds = problem.kinds[kind].read / problem.nodes[rank].read
                slowest.append(self._row({self._time(kind): _UNIT, self._at(kind, node): -_UNIT * seconds}))
        for node, rank in enumerate(self.members):
            weights = {self._at(kind, node): each.nbytes / _UNIT for kind, each in enumerate(problem.kinds)}
            kept = {self._at(kind, node): each.kv_bytes / _UNIT for kind, each in enumerate(problem.kinds)}
            held.append((self._row(kept), self._room(rank)))
            both = {at: weights[at] + kept[at] for at in weights}
            lying = {self._disk(kind, node): each for kind, each in enumerate(problem.kinds)}
            held.append((self._row({**both, **dict.fromkeys(lying, -1.0)}), self._room(rank)))
            held += [
                (self._row({self._disk(kind, node): 1.0, self._at(kind, node): -weights[self._at(kind, node)]}), 0)
                for kind in range(kinds)
            ]
            rate = problem.nodes[rank].disk / (_UNIT * _UNIT)
            loading = {at: -each.read_from_disk / rate for at, each in lying.items()}
            loads.append(self._row({**loading, self._width - 1: _UNIT}))
        total = self._row({self._width - 1: 1.0, **{self._time(kind): -1.0 for kind in range(kinds)}})
        yield LinearConstraint(np.array(sums), units, units)
        yield LinearConstraint(np.array(slowest), 0, np.inf)
        yield LinearConstraint(np.array([row for row, _ in held]), -np.inf, [room for _, room in held])
        yield LinearConstraint(np.array(loads), 0, np.inf)
        yield LinearConstraint(total, self._outside_blocks, np.inf)

    def split(self, found: F64) -> HomeSplit:
        """Return the split that the solution `found` describes; its times are calculated from whole units."""
        problem, (kinds, nodes) = self.problem, self._counts
        units = np.round(found[: kinds * nodes]).astype(int).reshape(kinds, nodes)
        times = [
            max(count * each.read / problem.nodes[rank].read for count, rank in zip(row, self.members, strict=True))
            for row, each in zip(units.tolist(), problem.kinds, strict=True)
        ]
        compute, exchange = sum(times) + problem.nodes[0].turn, problem.sums(self.members)
        loading = max(self._loading(node, units[:, node].tolist()) for node in range(nodes))
        dealt = {each.kind: tuple(row) for each, row in zip(problem.kinds, units.tolist(), strict=True)}
        return HomeSplit(self.members, dealt, compute, exchange, max(0.0, loading - compute - exchange))

    def _loading(self, node: int, units: Sequence[int]) -> float:
        """Return the seconds in which a node's disk reads the weights that a token needs and memory lacks."""
        rank = self.members[node]
        held = list(zip(units, self.problem.kinds, strict=True))
        excess = sum(count * (each.nbytes + each.kv_bytes) for count, each in held) - self._room(rank) * _UNIT
        read = 0.0
        for count, each in sorted(held, key=lambda pair: pair[1].read_from_disk):
            outside = min(max(0.0, excess), count * each.nbytes)
            read, excess = read + outside * each.read_from_disk, excess - outside
        return read / self.problem.nodes[rank].disk

    @property
    def _outside_blocks(self) -> float:
        return self.problem.sums(self.members) + self.problem.nodes[0].turn

    def _room(self, rank: int) -> float:
        node = self.problem.nodes[rank]
        return max(0, node.memory - node.fixed) / _UNIT

    def _row(self, entries: dict[int, float]) -> F64:
        row = np.zeros(self._width)
        row[list(entries)] = list(entries.values())
        return row

    def _at(self, kind: int, node: int) -> int:
        return kind * len(self.members) + node

    def _time(self, kind: int) -> int:
        kinds, nodes = self._counts
        return kinds * nodes + kind

    def _disk(self, kind: int, node: int) -> int:
        kinds, nodes = self._counts
        return kinds * nodes + kinds + kind * nodes + node
