"""Rings: stages of one node each. A node has several stages, so that its disk reads while other nodes compute.

A node of R stages has R visits (turns to compute) in a token. Between two visits, its disk reads the first W bytes of
the next visit into memory that is set aside. The set-aside memory cannot hold resident weights, so the D bytes that do
not fit into memory become D + W. Of these, R W bytes are read between visits, and the others during visits:

    wait = max(0, (D + W - R W) / disk - own)          W <= disk (L - own - wait) / R

`own` is the seconds in which the node computes, and L the seconds of a token, which contain the waits of all nodes.
With one visit the wait does not depend on W. Experts are chosen during a visit, so no expert is read before it.

If the time between visits limits W, so that the second line holds with `=`, the first one becomes

    wait = R (D / disk - own) - (R - 1) (L - own)

A run gains less than that, so only 0.4 of the gain is counted (`_REACHED`). With 110 MiB a node in the home
`home-slow-disks`, the nodes of a 1.1B model waited 0.70, 0.31, 0.31 and 0 s a token in a ring of 2 visits. The forecast
with 0.4 of the gain is 0.68, 0.29, 0.29 and 0 s.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from scheduler.model.home.problem import HomeNode, Members, UnitKind
from scheduler.model.home.solve import split_over
from scheduler.model.home.stages import MASTER, Layout, Stage, StageProblem

MOST_STAGES = 32  # as many as messages can name (`allreduce.stages`)
_VISITS = (2, 4)
_REACHED = 0.4  # the counted share of the gain from reading ahead: nodes plan their memory as if they had one visit
_UNLIMITED = 1 << 60  # bytes
_HALVINGS = 40  # of the interval that contains the seconds of a token


def is_ring(stages: Sequence[tuple[int, int, Members]]) -> bool:
    """Return True if any node is in several of `stages`."""
    return any(count > 1 for count in Counter(rank for _, _, members in stages for rank in members).values())


def evaluate_ring(problem: StageProblem, stages: Sequence[tuple[int, int, Members]]) -> Layout | None:
    """Return the layout of a ring: each stage has one node, and a node may have several stages.

    Args:
        problem: the model and the nodes.
        stages: the first layer, the last layer + 1 and the member of each stage.

    Returns:
        The layout, or None if a node's memory cannot hold its keys and values.
    """
    roomy = replace(problem, nodes=tuple(replace(each, memory=_UNLIMITED, turn=0.0) for each in problem.nodes))
    made, source = list[Stage](), MASTER
    for first, last, members in stages:
        split = split_over(roomy.part(first, last, members), members)
        assert split is not None
        made.append(Stage(first, last, split, problem.hop(source, members, 1)))
        source = members[0]
    visitors = [_visitor(problem, rank, made) for rank in sorted({rank for _, _, (rank,) in stages})]
    if any(each.room < each.kept for each in visitors):
        return None
    layout = Layout(problem, tuple(made), problem.hop(source, (MASTER,), 1), problem.nodes[MASTER].turn)
    token = _token(visitors, layout.seconds)
    waits = {each.rank: each.wait(token) / each.visits for each in visitors}
    waiting = (replace(each, split=replace(each.split, disk=waits[each.split.members[0]])) for each in made)
    return replace(layout, stages=tuple(waiting))


def best_ring(problem: StageProblem, row: Layout, streams: int) -> Layout | None:
    """Return the fastest ring of the nodes of `row`, in their order.

    Return None if no node of `row` waits for its disk, if there is only one node, or if no ring fits.

    The layers are divided so that all disks take equally long. Rings of 2 and of 4 visits are compared, because more
    visits leave too few layers for each.

    Args:
        problem: the model and the nodes.
        row: a layout of stages of one node each.
        streams: the number of answers at once that shall be fastest together.
    """
    ranks = [stage.split.members[0] for stage in row.stages]
    if not row.disk or len(ranks) < 2:
        return None
    whole = problem.part(0, len(problem.layers), (ranks[0],))
    held = sum(kind.units * (kind.nbytes + kind.kv_bytes) for kind in whole.kinds)
    rooms = np.array([max(0, problem.nodes[rank].memory - problem.nodes[rank].fixed) for rank in ranks])
    disks = np.array([problem.nodes[rank].disk for rank in ranks])
    parts = (rooms + max(0.0, held - rooms.sum()) * disks / disks.sum()) / held
    laid = (_laid(problem, ranks, (parts / parts.sum()).tolist(), visits) for visits in _VISITS)
    found = [ring for stages in laid if stages and (ring := evaluate_ring(problem, stages)) is not None]
    return min(found, key=lambda each: each.streams(streams), default=None)


def _laid(
    problem: StageProblem, ranks: Sequence[int], parts: Sequence[float], visits: int
) -> list[tuple[int, int, Members]]:
    """Return the stages of a ring: in each of `visits` equal rounds, every node gets its share in `parts` of the
    layers.

    Return an empty list if there are too few layers, or more stages than messages can name.
    """
    cuts = np.array(problem.cuts)
    wanted = np.cumsum(np.tile(parts, visits)) / visits * cuts[-1]
    ends = [0, *(int(cuts[np.abs(cuts - end).argmin()]) for end in wanted)]
    if len(wanted) > MOST_STAGES or any(first >= last for first, last in pairwise(ends)):
        return []
    return [(*each, (rank,)) for each, rank in zip(pairwise(ends), [*ranks] * visits, strict=True)]


@dataclass(frozen=True)
class _Visitor:
    """A node of a ring, with the units of all its stages.

    `visits` is the number of its stages, `own` the seconds in which it computes for a token, and `room` the bytes that
    it has for weights, keys and values.
    """

    rank: int
    node: HomeNode
    visits: int
    own: float
    kinds: tuple[UnitKind, ...]
    room: float

    @property
    def kept(self) -> float:
        return sum(each.units * each.kv_bytes for each in self.kinds)

    @property
    def weights(self) -> float:
        return sum(each.units * each.nbytes for each in self.kinds)

    def wait(self, token: float) -> float:
        """Return the seconds that the node waits for its disk in a token that takes `token` seconds."""
        disk, visits = self.node.disk, self.visits
        wait = self._read(0.0) / disk - self.own
        if all(each.read_from_disk == 1 for each in self.kinds):
            most = min(self.weights / visits, self.room - self.kept)
            roomy = (self._read(most) - visits * most) / disk - self.own
            least = min(wait, max(0.0, roomy, visits * wait - (visits - 1) * (token - self.own)))
            wait -= _REACHED * max(0.0, wait - least)
        return max(0.0, wait)

    def _read(self, ahead: float) -> float:
        """Return the bytes that the disk reads per token if `ahead` bytes of memory are set aside for reading ahead."""
        excess = max(0.0, self.weights + self.kept + ahead - self.room)
        read = 0.0
        for each in sorted(self.kinds, key=lambda kind: kind.read_from_disk):
            outside = min(excess, each.units * each.nbytes)
            read, excess = read + outside * each.read_from_disk, excess - outside
        return read


def _visitor(problem: StageProblem, rank: int, stages: Sequence[Stage]) -> _Visitor:
    own = [each for each in stages if each.split.members == (rank,)]
    parts = [problem.part(each.first, each.last, (rank,)) for each in own]
    fixed = problem.nodes[rank].fixed + sum(part.nodes[rank].fixed - problem.nodes[rank].fixed for part in parts)
    kinds = tuple(kind for part in parts for kind in part.kinds)
    node = problem.nodes[rank]
    busy = sum(each.split.compute for each in own) + (node.turn if rank == MASTER else 0.0)
    return _Visitor(rank, node, len(own), busy, kinds, max(0.0, node.memory - fixed))


def _token(visitors: Sequence[_Visitor], busy: float) -> float:
    """Return the seconds of a token including the time that nodes wait for disks.

    Without waiting, it takes `busy` seconds.
    """
    least, most = busy, busy + sum(each.wait(busy) for each in visitors)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if busy + sum(each.wait(middle) for each in visitors) > middle:
            least = middle
        else:
            most = middle
    return most
