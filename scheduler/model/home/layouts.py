"""The search for the layout with the fewest seconds per token: groups, their order, and their layers together.

What a group of nodes costs depends only on its layers, and a hop only on the leader of the stage before. So the best
layout is found by dynamic programming over (nodes used so far, number of stages, last leader, layers done). This is
the recursion of Held and Karp (1962) for the shortest round trip, with groups of nodes in place of towns. Nodes that
are alike are interchangeable, so only their number counts. While there are few sets of nodes, every group is tried and
the result is exact, but for groups that do not hold their part in memory: their time is then an estimate, and the found
layouts are evaluated anew. For many different nodes, only single nodes and clusters of near ones are tried, and
of the sets with equally many nodes only the most promising ones are kept. Where many layers make the tables large,
stages are first cut at some of the layers only, and the cuts of the found stages are then moved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf, prod
from operator import add

import numpy as np
import numpy.typing as npt

from scheduler.model.home.problem import HomeNode, Members
from scheduler.model.home.solve import proportional, split_over
from scheduler.model.home.stages import MASTER, Layout, Stage, StageProblem
from tpi.errors import PlanError

F64 = npt.NDArray[np.float64]
Used = tuple[int, ...]
"""How many nodes of each class are used."""

MOST_STAGES = 32  # as many as messages can name (`allreduce.stages`)
_MOST_STEPS = 7000  # pairs of a set of nodes and the next group; so many take about half a second
_MOST_SUMS = 50_000_000  # additions in all tables together, about a fifth of a second
_MARGIN = 1.03  # another layout must be faster than one stage by this factor
_EVEN = (0.01, 1.0)  # how much a stage's time counts more the longer it is: for one stream, and for several


def best_layout(problem: StageProblem, drop: bool = True, several: bool = True, streams: int = 1) -> Layout:
    """Return the layout to use: one stage with the master, unless another layout is faster by 3%.

    Args:
        problem: the model and the nodes.
        drop: whether nodes may be left out. If not, each worker holds layers, and the master may.
        several: whether there may be several stages, or one without the master.
        streams: the number of streams that shall be fastest together.

    Raises:
        PlanError: if the nodes' memories cannot hold the keys and values in addition to their fixed needs.
    """
    return chosen(layouts(problem, drop, several, streams), streams)


def chosen(found: Sequence[Layout], streams: int = 1) -> Layout:
    """Return the layout of `found`, which is sorted, that `best_layout` returns.

    Raises:
        PlanError: if there is none.
    """
    if not found:
        raise PlanError("the nodes have too little memory for the keys and values; give a smaller -c or more --memory")
    plain = (each for each in found if len(each.stages) == 1 and MASTER in each.members)
    one = next(plain, None)
    best = found[0]
    return one if one is not None and one.streams(streams) <= _MARGIN * best.streams(streams) else best


def layouts(problem: StageProblem, drop: bool = True, several: bool = True, streams: int = 1) -> list[Layout]:
    """Return the fastest layout of each number of stages, with the master and without, the fastest first.

    Layouts that do not fit are left out. Arguments as for `best_layout`.
    """
    tried = _EVEN[:1] if streams == 1 else _EVEN
    cuts = {tuple(each) for even in tried for each in _Search(problem, MOST_STAGES if several else 1, even).best(drop)}
    found = [each for each in (evaluate(problem, one) for one in cuts) if each is not None]
    return sorted(found, key=lambda each: (each.streams(streams), len(each.stages), each.members))


def evaluate(problem: StageProblem, stages: Sequence[tuple[int, int, Members]]) -> Layout | None:
    """Return the layout of these stages, `(first layer, last layer + 1, members)`, with the best shares in each.

    Return None if it does not fit.
    """
    made, source = list[Stage](), MASTER
    for first, last, members in stages:
        split = split_over(problem.part(first, last, members), members)
        if split is None:
            return None
        made.append(Stage(first, last, split, problem.hop(source, members, 1)))
        source = members[0]
    idle = all(MASTER not in members for _, _, members in stages)
    turn = problem.nodes[MASTER].turn if idle else 0.0
    return Layout(problem, tuple(made), problem.hop(source, (MASTER,), 1), turn)


def pure_layouts(problem: StageProblem) -> tuple[Layout | None, Layout | None]:
    """Return one stage of all nodes, and the best layout of one node a stage; None where it does not fit."""
    found = _Search(problem, MOST_STAGES, _EVEN[0], singles=True).best(drop=False)
    most = [cuts for cuts in found if len(cuts) == len(problem.nodes)]
    one = evaluate(problem, [(0, len(problem.layers), problem.everyone)])
    return one, evaluate(problem, most[0]) if most else None


Cuts = list[tuple[int, int, Members]]
"""Stages as first layer, last layer + 1, and members."""


class _Search:
    """The search.

    `_reached` has for each set of nodes the seconds by number of stages, last leader and layers done (as a position
    in `_cuts`); `_steps` the sets from which a set was reached, and the groups.
    """

    def __init__(self, problem: StageProblem, most: int, even: float, singles: bool = False) -> None:
        """Search through layouts of at most `most` stages, if `singles` of one node each.

        A stage's time counts up to 1 + `even` times, the more the longer it is, so that stages become even.
        """
        self.problem, self.even, self.singles = problem, even, singles
        self._reached: dict[Used, F64] = {}
        self._steps: dict[Used, list[tuple[Used, Members]]] = {}
        self._counted: dict[Members, Used] = {}
        self._costs: dict[Used, F64] = {}
        self._few_costs: dict[Used, F64] = {}
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
        self._run()

    def _run(self) -> None:
        """Fill the tables, from no nodes to all of them."""
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
        """Return the fastest stages for each number of them, over all nodes or, with `drop`, over any of them.

        Those with the master and those without are told apart.
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
        return [self._moved(self._traced(stages, used, leader)) for (stages, _), (_, used, leader) in found.items()]

    def _traced(self, stages: int, used: Used, leader: int) -> list[Members]:
        """Return the groups of the stages that lead to the end, found by going back step by step."""
        at, found = len(self._cuts) - 1, list[Members]()
        for number in range(stages, 0, -1):
            target = self._reached[used][number, leader, at]
            for before, members in self._steps[used]:
                came = self._reached[before][number - 1] + self._hop(members)[:, None]
                through = came.min(axis=0) + self._coarse(members)[:, at]
                first = int(through.argmin())
                if members[0] == leader and through[first] == target:
                    found.append(members)
                    used, leader, at = before, int(came[:, first].argmin()), first
                    break
        return found[::-1]

    def _moved(self, groups: Sequence[Members]) -> Cuts:
        """Return the best stages of these groups in this order, cut at any layer where that is possible."""
        cuts, costs = self.problem.cuts, [self._cost(members) for members in groups]
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
        """Add the stage of `members` to all that is known of the set of nodes `used`."""
        come = (self._reached[used][:-1] + self._hop(members)[:, None]).min(axis=1)
        gone = (come[:, :, None] + self._coarse(members)).min(axis=1)
        after = tuple(map(add, used, self._counts(members)))
        if after not in self._reached:
            shape = self._most + 1, len(self.problem.nodes), len(self._cuts)
            self._reached[after], self._steps[after] = np.full(shape, inf), []
        table = self._reached[after][1:, members[0]]
        np.minimum(table, gone, out=table)
        self._steps[after].append((used, members))

    def _promise(self, used: Used) -> float:
        """Return a lower bound of a token's seconds for layouts that begin with the nodes `used`."""
        best = self._reached[used].min(axis=(0, 1))
        return float((best + self._rest).min())

    @cached_property
    def _rest(self) -> F64:
        """Seconds in which the fastest node alone could compute what is behind each cut."""
        fastest = max(node.read for node in self.problem.nodes)
        reading = [sum(kind.units * kind.read for kind in layer.kinds) / fastest for layer in self.problem.layers]
        return np.array([sum(reading[self.problem.cuts[at] :]) for at in self._cuts])

    def _groups(self, used: Used, near: Sequence[Members] | None) -> Iterator[Members]:
        """Yield the groups that may hold the next stage; of nodes that are alike, the first that are not used."""
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
        """Return every single node and, unless only those are asked for, clusters of near nodes.

        Clusters begin as single nodes. The two that are nearest to each other are joined, again and again.
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
        """Return how many nodes of each class are in a group."""
        if members not in self._counted:
            self._counted[members] = tuple(len(set(each) & set(members)) for each in self._classes)
        return self._counted[members]

    def _hop(self, members: Members) -> F64:
        """Return the seconds of a hop to `members` from each leader."""
        if members not in self._hops:
            self._hops[members] = np.array([self.problem.hop(rank, members, 1) for rank in self.problem.everyone])
        return self._hops[members]

    def _coarse(self, members: Members) -> F64:
        """Return the seconds of `_cost` between the cuts of the search."""
        counts = self._counts(members)
        if counts not in self._few_costs:
            self._few_costs[counts] = self._cost(members)[np.ix_(self._cuts, self._cuts)]
        return self._few_costs[counts]

    def _cost(self, members: Members) -> F64:
        """Return the seconds of a stage of `members` from each cut to each later one; infinite if it does not fit."""
        counts = self._counts(members)
        if counts not in self._costs:
            self._costs[counts] = self._cost_of(members)
        return self._costs[counts]

    def _cost_of(self, members: Members) -> F64:
        nodes = [self.problem.nodes[rank] for rank in members]
        speeds = [node.read for node in nodes]
        turn = self.problem.nodes[MASTER].turn if MASTER in members else 0.0
        whole, kinds = self._table("everywhere"), self._kinds.items()
        read, weights, kept = (self._of_all(what) for what in ("read", "nbytes", "kv_bytes"))
        held = weights + kept
        rooms = [np.maximum(0.0, node.memory - node.fixed - whole) for node in nodes]
        outside = whole / min(speeds) + turn + self._table("sums") * self.problem.exchange(members, 1)
        compute = np.zeros_like(whole)
        for name, units in kinds:
            slowest = max(count / speed for count, speed in zip(proportional(units, speeds), speeds, strict=True))
            compute = compute + slowest * self._table("read", name)
        parts = np.array(speeds)[:, None, None] / sum(speeds)
        seconds = self._with_disks(nodes, rooms, held, parts, compute + outside)
        if len(nodes) > 1 and np.any(parts * held > rooms):  # less for nodes with little memory
            parts = _filled(speeds, np.array(rooms) / np.maximum(held, 1.0))
            slowed = (parts / np.array(speeds)[:, None, None]).max(axis=0) * read
            seconds = np.minimum(seconds, self._with_disks(nodes, rooms, held, parts, slowed + outside))
        cuts = np.array(self.problem.cuts)
        seconds = np.where(cuts[:, None] < cuts, seconds, 0.0)
        found: F64 = seconds * (1 + self.even * seconds / (seconds + self._rest[0]))
        found[(kept > sum(rooms)) | (cuts[:, None] >= cuts)] = inf
        return found

    def _with_disks(self, nodes: Sequence[HomeNode], rooms: Sequence[F64], held: F64, parts: F64, busy: F64) -> F64:
        """Return the seconds of nodes that hold these parts of `held` bytes, and compute and sum for `busy` seconds."""
        longest = busy
        for node, room, part in zip(nodes, rooms, parts, strict=True):
            read, excess = np.zeros_like(busy), np.maximum(0.0, part * held - room)
            for name in sorted(self._kinds, key=self._read_from_disk):
                outside = np.minimum(excess, part * self._kinds[name] * self._table("nbytes", name))
                read, excess = read + outside * self._read_from_disk(name), excess - outside
            longest = np.maximum(longest, read / node.disk)
        return longest

    @cached_property
    def _kinds(self) -> dict[str, int]:
        return {kind.kind: kind.units for layer in self.problem.layers for kind in layer.kinds}

    def _read_from_disk(self, name: str) -> float:
        return next(kind.read_from_disk for each in self.problem.layers for kind in each.kinds if kind.kind == name)

    def _of_all(self, what: str) -> F64:
        """Return a number of all units from each cut to each other one."""
        if (what, "all") not in self._tables:
            parts = [units * self._table(what, name) for name, units in self._kinds.items()]
            self._tables[what, "all"] = np.sum(parts, axis=0)
        return self._tables[what, "all"]

    def _table(self, what: str, name: str = "") -> F64:
        """Return a number of the layers, or of one unit of a kind in them, from each cut to each other one."""
        if (what, name) not in self._tables:
            layers = self.problem.layers
            numbers = [
                sum(getattr(kind, what) for kind in layer.kinds if kind.kind == name) if name else getattr(layer, what)
                for layer in layers
            ]
            until = np.concatenate([[0.0], np.cumsum(numbers)])[list(self.problem.cuts)]
            self._tables[what, name] = until - until[:, None]
        return self._tables[what, name]

    @cached_property
    def _tables(self) -> dict[tuple[str, str], F64]:
        return {}


def _filled(speeds: Sequence[float], most: F64) -> F64:
    """Return parts of a whole in proportion to speed, but at most `most`; what no node has room for goes to all.

    Parts are `[nodes, ...]`, as `most`.
    """
    speed = np.array(speeds)[:, None, None]
    full = np.zeros_like(most, dtype=bool)
    for _ in speeds:
        left = 1.0 - np.where(full, most, 0.0).sum(axis=0)
        parts = np.where(full, most, left * speed / np.maximum(np.where(full, 0.0, speed).sum(axis=0), 1.0))
        full = full | (parts > most)
    found = np.where(full, most, parts)
    spilled: F64 = found + (1.0 - found.sum(axis=0)) * speed / speed.sum()
    return spilled


def _pairs(classes: Sequence[Members]) -> int:
    """Return the number of pairs of a set of nodes and a group of others."""
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
    """Return True if two nodes are equally fast, and equally far from every other node."""
    nodes = [replace(problem.nodes[rank], name="") for rank in (one, other)]
    others = (rank for rank in problem.everyone if rank not in (one, other))
    pairs = (((rank, (one,)), (rank, (other,))) for rank in others)
    return nodes[0] == nodes[1] and all(
        problem.hop(*near, tokens) == problem.hop(*far, tokens) for near, far in pairs for tokens in (1, 1000)
    )
