"""The layouts to compare and the one to use: stages with the best shares in each, and their seconds per token."""

from collections.abc import Sequence

from scheduler.model.home.problem import Members
from scheduler.model.home.rings import MOST_STAGES, best_ring, evaluate_ring, is_ring
from scheduler.model.home.search import Search
from scheduler.model.home.solve import split_equally, split_over
from scheduler.model.home.stages import MASTER, Layout, Stage, StageProblem
from tpi.errors import PlanError

_COMPARED = 6  # layouts of a search that are evaluated
_MARGIN = 1.03  # another layout must be faster than one stage by this factor
_EVEN = (0.01, 1.0)  # `even` of `StageCosts`, the preference for stages of equal length: for one stream, for several


def best_layout(problem: StageProblem, drop: bool = True, several: bool = True, streams: int = 1) -> Layout:
    """Return the layout to use: one stage with the master, unless another layout is faster by 3%.

    Args:
        problem: the model and the nodes.
        drop: whether nodes may be left out. If not, each worker holds layers, and the master may.
        several: whether there may be several stages, or one without the master.
        streams: the number of answers at once for which the layout should be fastest.

    Raises:
        PlanError: if the nodes' memories cannot hold the keys and values in addition to their fixed needs.
    """
    return chosen(layouts(problem, drop, several, streams), streams)


def chosen(found: Sequence[Layout], streams: int = 1) -> Layout:
    """Return the layout that `best_layout` chooses from `found`, which is sorted by time.

    Raises:
        PlanError: if `found` is empty.
    """
    if not found:
        raise PlanError("the nodes have too little memory for the keys and values; give a smaller -c or more --memory")
    plain = (each for each in found if len(each.stages) == 1 and MASTER in each.members)
    one = next(plain, None)
    best = found[0]
    return one if one is not None and one.streams(streams) <= _MARGIN * best.streams(streams) else best


def layouts(problem: StageProblem, drop: bool = True, several: bool = True, streams: int = 1) -> list[Layout]:
    """Return the fastest layouts of different numbers of stages, with and without the master, in ascending order of
    time.

    One stage with the master is among them if it fits. Layouts that do not fit are left out. Arguments as for
    `best_layout`.
    """
    found: dict[tuple[tuple[int, int, Members], ...], Layout | None] = {}
    for even in _EVEN[:1] if streams == 1 else _EVEN:
        fitting, plain = 0, False
        for stages in map(tuple, Search(problem, MOST_STAGES if several else 1, even).best(drop)):
            one = len(stages) == 1 and MASTER in stages[0][2]
            if fitting < _COMPARED or (one and not plain):
                found[stages] = found[stages] if stages in found else evaluate(problem, stages)
                fitting, plain = fitting + (found[stages] is not None), plain or one
    fit = [each for each in found.values() if each is not None]
    if several and (ring := _ring(problem, fit, streams)) is not None:
        fit.append(ring)
    return sorted(fit, key=lambda each: (each.streams(streams), len(each.stages), each.members))


def _ring(problem: StageProblem, found: Sequence[Layout], streams: int) -> Layout | None:
    """Return the fastest ring (each node has several stages); None unless it is 3% faster than every layout in `found`.

    Rings are tried only if a layout in `found` waits for disks.
    """
    best = min(found, key=lambda each: each.streams(streams), default=None)
    if best is None or not any(each.disk for each in found):
        return None
    _, singles = pure_layouts(problem)
    rows = [each for each in (*found, singles) if each and all(len(one.split.members) == 1 for one in each.stages)]
    rings = [ring for row in rows if (ring := best_ring(problem, row, streams)) is not None]
    ring = min(rings, key=lambda each: each.streams(streams), default=None)
    return ring if ring is not None and _MARGIN * ring.streams(streams) < best.streams(streams) else None


def evaluate(problem: StageProblem, stages: Sequence[tuple[int, int, Members]], equal: bool = False) -> Layout | None:
    """Return the layout of the given stages, with the best shares of each node in its stage.

    Args:
        problem: the model and the nodes.
        stages: the first layer, the last layer + 1 and the members of each stage.
        equal: whether the nodes of a stage get equal shares instead of the best ones.

    Returns:
        The layout, or None if the nodes' memories cannot hold it.
    """
    if is_ring(stages):
        return evaluate_ring(problem, stages)
    made, source = list[Stage](), MASTER
    for first, last, members in stages:
        split = (split_equally if equal else split_over)(problem.part(first, last, members), members)
        if split is None:
            return None
        made.append(Stage(first, last, split, problem.hop(source, members, 1)))
        source = members[0]
    idle = all(MASTER not in members for _, _, members in stages)
    turn = problem.nodes[MASTER].turn if idle else 0.0
    return Layout(problem, tuple(made), problem.hop(source, (MASTER,), 1), turn)


def pure_layouts(problem: StageProblem) -> tuple[Layout | None, Layout | None]:
    """Return the layout of one stage on all nodes, and the best of the layouts with one node a stage.

    A layout that does not fit is None.
    """
    found = Search(problem, MOST_STAGES, _EVEN[0], singles=True).best(drop=False)
    most = [cuts for cuts in found if len(cuts) == len(problem.nodes)]
    one = evaluate(problem, [(0, len(problem.layers), problem.everyone)])
    return one, evaluate(problem, most[0]) if most else None
