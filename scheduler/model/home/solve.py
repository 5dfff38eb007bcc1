"""The split with the fewest seconds for a token: HiGHS for the units of given nodes, a search over who takes part.

The unknowns for given nodes: how many units of each kind every node has (whole numbers), the seconds of the slowest
node in the blocks of a kind, and the bytes that each node's memory does not hold. Blocks are summed over all nodes, so
a kind takes as long as its slowest node; what does not fit is read from the node's disk, which runs ahead across sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from scheduler.model.highs import solve_milp
from scheduler.model.home.problem import Dealing, HomeProblem, Members
from tpi.errors import PlanError

F64 = npt.NDArray[np.float64]
_SECONDS = 0.5  # after which the best split found so far is taken
_GAP = 2e-3  # of the time, from the best that could be
_EVERY_SET = 9  # nodes up to which every set of them is looked at
_UNIT = 1e6  # bytes, and microseconds in a second: numbers that a solver can compare


def best_split(problem: HomeProblem, drop: bool = True) -> Dealing:
    """The best split over all nodes or, with `drop`, without those whose sums cost more than they bring.

    Raises:
        PlanError: if no set of nodes holds its units' keys and values beside what each needs anyway.
    """
    everyone = tuple(range(len(problem.nodes)))
    sets = _sets(problem, everyone) if drop else [everyone]
    best: Dealing | None = None
    for members in sorted(sets, key=problem.bound):
        if best is not None and problem.bound(members) >= best.seconds:
            break
        found = split_over(problem, members)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    if best is None:
        raise PlanError("these nodes' memories do not hold the keys and values; give a smaller -c, or more --memory")
    return best


def _sets(problem: HomeProblem, everyone: Members) -> list[Members]:
    """Sets of nodes that may be the best: every one, or of many nodes those that leave out one after the other."""
    if len(everyone) <= _EVERY_SET:
        every = ((0, *others) for size in everyone for others in combinations(everyone[1:], size))
        return list({_alike(problem, members): members for members in every}.values())
    found = [everyone]
    while len(found[-1]) > 1:
        fewer = (tuple(rank for rank in found[-1] if rank != gone) for gone in found[-1][1:])
        found.append(min(fewer, key=problem.bound))
    return found


def _alike(problem: HomeProblem, members: Members) -> tuple[object, ...]:
    """The same for sets whose nodes and sums are the same but for their names."""
    nodes = sorted(astuple(problem.nodes[rank])[1:] for rank in members)
    return (*nodes, problem.sums(members))


def split_over(problem: HomeProblem, members: Members) -> Dealing | None:
    """The best split over exactly these nodes; None if their memories do not hold it."""
    from scipy.optimize import Bounds

    model = _Model(problem, members)
    solved = solve_milp(
        model.objective(), integrality=model.integrality(), bounds=Bounds(0, model.upper()),
        constraints=list(model.constraints()), options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )  # fmt: skip
    return None if solved.x is None else model.dealing(solved.x)


@dataclass(frozen=True)
class _Model:
    """Columns: units of every kind and node, then a time for each kind, then bytes from each disk, then the token."""

    problem: HomeProblem
    members: Members

    @property
    def _counts(self) -> tuple[int, int]:
        return len(self.problem.dealt), len(self.members)

    @property
    def _width(self) -> int:
        kinds, nodes = self._counts
        return kinds * nodes + kinds + nodes + 1

    def objective(self) -> F64:
        """The seconds of a token, and a trace of everything else, so that nothing is read in vain."""
        kinds, nodes = self._counts
        weights = np.zeros(self._width)
        weights[kinds * nodes :] = 1e-6
        weights[-1] = 1.0
        return weights

    def integrality(self) -> F64:
        """Units are whole."""
        kinds, nodes = self._counts
        whole = np.zeros(self._width)
        whole[: kinds * nodes] = 1
        return whole

    def upper(self) -> F64:
        """No node has more units than there are."""
        kinds, nodes = self._counts
        most = np.full(self._width, np.inf)
        most[: kinds * nodes] = np.repeat([each.units for each in self.problem.dealt], nodes)
        return most

    def constraints(self) -> Iterator[object]:
        """Every unit is dealt; a kind takes as long as its slowest node; memory, disks, and the token's time."""
        from scipy.optimize import LinearConstraint

        problem, (kinds, nodes) = self.problem, self._counts
        sums, slowest, held, loads = [], [], [], []
        units = [each.units for each in problem.dealt]
        for kind in range(kinds):
            sums.append(self._row({self._at(kind, node): 1.0 for node in range(nodes)}))
            for node, rank in enumerate(self.members):
                seconds = problem.dealt[kind].read / problem.nodes[rank].read
                slowest.append(self._row({self._time(kind): _UNIT, self._at(kind, node): -_UNIT * seconds}))
        for node, rank in enumerate(self.members):
            weights = {self._at(kind, node): each.nbytes / _UNIT for kind, each in enumerate(problem.dealt)}
            kept = {self._at(kind, node): each.kept / _UNIT for kind, each in enumerate(problem.dealt)}
            held.append((self._row(kept), self._room(rank)))
            both = {at: weights[at] + kept[at] for at in weights}
            held.append((self._row(both | {self._disk(node): -1.0}), self._room(rank)))
            loads.append(
                self._row({self._width - 1: _UNIT, self._disk(node): -_UNIT * _UNIT / problem.nodes[rank].disk})
            )
        total = self._row({self._width - 1: 1.0, **{self._time(kind): -1.0 for kind in range(kinds)}})
        yield LinearConstraint(np.array(sums), units, units)
        yield LinearConstraint(np.array(slowest), 0, np.inf)
        yield LinearConstraint(np.array([row for row, _ in held]), -np.inf, [room for _, room in held])
        yield LinearConstraint(np.array(loads), 0, np.inf)
        yield LinearConstraint(total, self._beside, np.inf)

    def dealing(self, found: F64) -> Dealing:
        """The split that these values of the columns are, with its times worked out from the units."""
        problem, (kinds, nodes) = self.problem, self._counts
        units = np.round(found[: kinds * nodes]).astype(int).reshape(kinds, nodes)
        times = [
            max(count * each.read / problem.nodes[rank].read for count, rank in zip(row, self.members, strict=True))
            for row, each in zip(units.tolist(), problem.dealt, strict=True)
        ]
        compute, exchange = sum(times) + problem.nodes[0].turn, problem.sums(self.members)
        loading = max(self._loading(node, units[:, node].tolist()) for node in range(nodes))
        dealt = {each.kind: tuple(row) for each, row in zip(problem.dealt, units.tolist(), strict=True)}
        return Dealing(self.members, dealt, compute, exchange, max(0.0, loading - compute - exchange))

    def _loading(self, node: int, units: Sequence[int]) -> float:
        """Seconds that a node's disk takes for what its memory does not hold."""
        rank = self.members[node]
        needed = sum(count * (each.nbytes + each.kept) for count, each in zip(units, self.problem.dealt, strict=True))
        return max(0.0, needed - self._room(rank) * _UNIT) / self.problem.nodes[rank].disk

    @property
    def _beside(self) -> float:
        """Seconds of a token in which no block is computed."""
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

    def _disk(self, node: int) -> int:
        kinds, nodes = self._counts
        return kinds * nodes + kinds + node
