"""The search for the layout with the fewest seconds per token: groups, their order, and their layers together.

The cost of a group depends only on its layers, and the cost of a hop only on the leader of the stage before. So the
best layout is found by dynamic programming over (nodes used so far, number of stages, last leader, layers done). This
is the recursion of Held and Karp (1962) for the shortest round trip, with groups of nodes as towns.

Nodes that are alike are interchangeable, so only their number counts. If there are few sets of nodes, every group is
tried and the result is exact, except for groups that do not hold their part in memory: their time is an estimate, and
the found layouts are evaluated anew. If there are many different nodes, only single nodes and clusters of near nodes
are tried, and of the sets with equally many nodes, only the most promising ones are continued. If many layers would
make the tables large, stages are first cut at some of the layers only, and the cuts of the found stages are then moved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf, prod
from operator import add

import numpy as np

from scheduler.model.home.costs import F64, StageCosts
from scheduler.model.home.problem import Members
from scheduler.model.home.stages import MASTER, StageProblem

Used = tuple[int, ...]
"""How many nodes of each class are used."""

_MOST_STEPS = 7000  # pairs of a set of nodes and the next group; so many take about half a second
_MOST_SUMS = 50_000_000  # additions in all tables together, about a fifth of a second

Cuts = list[tuple[int, int, Members]]
"""Stages as first layer, last layer + 1, and members."""


class Search:
    """A search for the fastest stages by dynamic programming.

    Both tables have an entry for each set of nodes that some stages use. An entry of `_reached` is the fewest seconds
    of such stages, `[stages, last leader, layers done as a position in _cuts]`. An entry of `_steps` lists the last
    stages that lead to the set: the set without the stage's group, and the group.
    """

    def __init__(self, problem: StageProblem, most: int, even: float, singles: bool = False) -> None:
        """Search layouts of at most `most` stages; if `singles`, only layouts of one node a stage.

        `even` is the preference for stages of equal length (`StageCosts`).
        """
        self.problem, self.even, self.singles = problem, even, singles
        self._reached: dict[Used, F64] = {}
        self._steps: dict[Used, list[tuple[Used, Members]]] = {}
        self._counted: dict[Members, Used] = {}
        self._hops: dict[Members, F64] = {}
        self._classes = _classes(problem)
        pairs = _pairs(self._classes)
        self._exact = pairs <= _MOST_STEPS
        if not self._exact:
            self._classes = [(rank,) for rank in problem.everyone]
        self._several = most > 1
        self._most = min(most, len(problem.nodes), len(problem.cuts) - 1)
        few = int((_MOST_SUMS / min(pairs, _MOST_STEPS) / (self._most + 1)) ** 0.5)
        places = np.linspace(0, len(problem.cuts) - 1, max(self._most + 1, min(few, len(problem.cuts))))
        self._cuts = sorted({round(place) for place in places})
        self._costs = StageCosts(problem, [problem.cuts[at] for at in self._cuts], even)
        self._costs_known: dict[Used, F64] = {}
        self._run()

    def _run(self) -> None:
        count = len(self.problem.nodes)
        begin = np.full((self._most + 1, count, len(self._cuts)), inf)
        begin[0, MASTER, 0] = 0.0  # hidden states come from the master
        self._reached[(0,) * len(self._classes)] = begin
        near = None if self._exact and not self.singles else self._near_groups()
        kept = _MOST_STEPS if near is None or self._exact else _MOST_STEPS // (count * len(near))
        for size in range(count):
            level = [used for used in self._reached if sum(used) == size]
            for used in sorted(level, key=self._promise)[: max(1, kept)]:
                for members in self._groups(used, near):
                    self._step(used, members)

    def best(self, drop: bool) -> list[Cuts]:
        """Return the fastest stages for each number of stages, with the master among the nodes and without it.

        The stages use all nodes or, with `drop`, any of them. They are in ascending order of the search's estimate of
        time.
        """
        found: dict[tuple[int, bool], tuple[float, Used, int]] = {}
        back = np.array([self.problem.hop(rank, (MASTER,), 1) for rank in self.problem.everyone])
        for used, seconds in self._reached.items():
            left = [rank for each, some in zip(self._classes, used, strict=True) for rank in each[some:]]
            if not drop and left not in ([], [MASTER]):
                continue
            idle = MASTER in left
            if idle and not self._several:
                continue
            whole = seconds[:, :, -1] + back + (self.problem.nodes[MASTER].turn if idle else 0.0)
            for stages in range(1, self._most + 1):
                leader = int(whole[stages].argmin())
                if whole[stages, leader] < found.get((stages, idle), (inf,))[0]:
                    found[stages, idle] = float(whole[stages, leader]), used, leader
        ordered = sorted(found.items(), key=lambda each: each[1][0])
        return [self._moved(self._traced(stages, used, leader)) for (stages, _), (_, used, leader) in ordered]

    def _traced(self, stages: int, used: Used, leader: int) -> list[Members]:
        """Return the groups of the fastest `stages` stages on the nodes `used`, found from the last stage backwards.

        `leader` is the rank of the lowest node of the last stage.
        """
        at, found = len(self._cuts) - 1, list[Members]()
        for number in range(stages, 0, -1):
            target = self._reached[used][number, leader, at]
            for before, members in self._steps[used]:
                came = self._reached[before][number - 1] + self._hop(members)[:, None]
                through = came.min(axis=0) + self._cost(members)[:, at]
                first = int(through.argmin())
                if members[0] == leader and through[first] == target:
                    found.append(members)
                    used, leader, at = before, int(came[:, first].argmin()), first
                    break
        return found[::-1]

    def _moved(self, groups: Sequence[Members]) -> Cuts:
        """Return the fastest stages of `groups`, in this order, with cuts at any of the problem's possible cuts."""
        cuts, every = self.problem.cuts, StageCosts(self.problem, self.problem.cuts, self.even)
        costs = [every.of(members) for members in groups]
        times = [np.where(np.arange(len(cuts)) == 0, 0.0, inf)]
        for cost in costs:
            times.append((times[-1][:, None] + cost).min(axis=0))
        at, found = len(cuts) - 1, Cuts()
        for members, cost, time in zip(groups[::-1], costs[::-1], times[-2::-1], strict=True):
            first = int((time + cost[:, at]).argmin())
            found.append((cuts[first], cuts[at], members))
            at = first
        return found[::-1]

    def _step(self, used: Used, members: Members) -> None:
        """Update both tables with a stage of `members` after any known stages that use exactly the nodes `used`."""
        come = (self._reached[used][:-1] + self._hop(members)[:, None]).min(axis=1)
        gone = (come[:, :, None] + self._cost(members)).min(axis=1)
        after = tuple(map(add, used, self._counts(members)))
        if after not in self._reached:
            shape = self._most + 1, len(self.problem.nodes), len(self._cuts)
            self._reached[after], self._steps[after] = np.full(shape, inf), []
        table = self._reached[after][1:, members[0]]
        np.minimum(table, gone, out=table)
        self._steps[after].append((used, members))

    def _promise(self, used: Used) -> float:
        """Return a lower bound of a token's seconds for layouts whose first stages use the nodes `used`."""
        best = self._reached[used].min(axis=(0, 1))
        return float((best + self._rest).min())

    @cached_property
    def _rest(self) -> F64:
        """Seconds in which the fastest node alone could compute the layers behind each cut, `[cuts]`."""
        fastest = max(node.read for node in self.problem.nodes)
        reading = [sum(kind.units * kind.read for kind in layer.kinds) / fastest for layer in self.problem.layers]
        return np.array([sum(reading[self.problem.cuts[at] :]) for at in self._cuts])

    def _groups(self, used: Used, near: Sequence[Members] | None) -> Iterator[Members]:
        """Yield the groups of nodes that may form the next stage when the nodes `used` have stages already.

        Of nodes that are alike, a group contains the first unused ones. `near` is the groups to choose from; None: all.
        """
        if near is not None:
            free = {rank for each, some in zip(self._classes, used, strict=True) for rank in each[some:]}
            first = {each[some] for each, some in zip(self._classes, used, strict=True) if some < len(each)}
            yield from (one for one in near if free.issuperset(one) and (len(one) > 1 or one[0] in first))
            return
        left = [range(len(each) - some + 1) for each, some in zip(self._classes, used, strict=True)]
        for counts in product(*left):
            if any(counts):
                parts = zip(self._classes, used, counts, strict=True)
                yield tuple(sorted(rank for each, some, more in parts for rank in each[some : some + more]))

    def _near_groups(self) -> list[Members]:
        """Return every single node and, unless only single nodes are wanted, clusters of near nodes.

        Clusters begin as single nodes. The two clusters whose nodes together have the fastest allreduce are joined,
        until one cluster is left. Every cluster on the way is returned.
        """
        clusters: list[Members] = [(rank,) for rank in self.problem.everyone]
        found = list(clusters)
        while len(clusters) > 1 and not self.singles:
            pairs = [(one, other) for at, one in enumerate(clusters) for other in clusters[at + 1 :]]
            pair = min(pairs, key=lambda each: self.problem.exchange(tuple(sorted(each[0] + each[1])), 1))
            joined = tuple(sorted(pair[0] + pair[1]))
            clusters = [*(one for one in clusters if one not in pair), joined]
            found.append(joined)
        return found

    def _counts(self, members: Members) -> Used:
        if members not in self._counted:
            self._counted[members] = tuple(len(set(each) & set(members)) for each in self._classes)
        return self._counted[members]

    def _hop(self, members: Members) -> F64:
        """Return the seconds of a hop to `members` from each node as the leader of the stage before, `[nodes]`."""
        if members not in self._hops:
            self._hops[members] = np.array([self.problem.hop(rank, members, 1) for rank in self.problem.everyone])
        return self._hops[members]

    def _cost(self, members: Members) -> F64:
        counts = self._counts(members)
        if counts not in self._costs_known:
            self._costs_known[counts] = self._costs.of(members)
        return self._costs_known[counts]


def _pairs(classes: Sequence[Members]) -> int:
    """Return how many pairs there are of a set of nodes and a group of other nodes, counting like nodes as equal."""
    return prod((len(each) + 1) * (len(each) + 2) // 2 for each in classes)


def _classes(problem: StageProblem) -> list[Members]:
    """Return the nodes in classes whose members differ only in name; the master is alone in its class."""
    found: list[list[int]] = [[MASTER]]
    for rank in problem.everyone[1:]:
        alike = next((each for each in found[1:] if _alike(problem, each[0], rank)), None)
        if alike is None:
            found.append([rank])
        else:
            alike.append(rank)
    return [tuple(each) for each in found]


def _alike(problem: StageProblem, one: int, other: int) -> bool:
    """Return True if the nodes `one` and `other` are equally fast, and hops from every other node take equally long."""
    nodes = [replace(problem.nodes[rank], name="") for rank in (one, other)]
    others = (rank for rank in problem.everyone if rank not in (one, other))
    pairs = (((rank, (one,)), (rank, (other,))) for rank in others)
    return nodes[0] == nodes[1] and all(
        problem.hop(*near, tokens) == problem.hop(*far, tokens) for near, far in pairs for tokens in (1, 1000)
    )
