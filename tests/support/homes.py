"""Homes for tests of the search for layouts: nodes of given speeds and distances, and a model of a few layers."""

from itertools import combinations

from scheduler.model.home.problem import HomeNode, UnitKind
from scheduler.model.home.stages import LayerWork, StageProblem

MB = 1_000_000
ROOM = 1 << 40


def home(
    speeds: list[float],
    apart: float | dict[tuple[int, int], float],
    layers: int = 4,
    rooms: list[int] | None = None,
    cuts: tuple[int, ...] = (),
) -> StageProblem:
    """Return a home whose model has 2 sums a layer, and twice the neurons in the last layer.

    `apart` are the seconds between two nodes.
    """

    def link(one: int, other: int) -> float:
        return apart if isinstance(apart, float) else apart[min(one, other), max(one, other)]

    nodes = tuple(
        HomeNode(f"node {rank}", speed, 0.2e9, room, 10 * MB, 0.0 if rank else 0.002)
        for rank, (speed, room) in enumerate(zip(speeds, rooms or [ROOM] * len(speeds), strict=True))
    )
    work = [
        LayerWork(
            (UnitKind("heads", 6, 1, MB, 1.2 * MB, MB / 2), UnitKind("neurons", 8, 1, wide * MB, wide * MB)), sums=2
        )
        for wide in [3] * (layers - 1) + [6]
    ]
    return StageProblem(
        nodes,
        tuple(work),
        cuts or tuple(range(layers + 1)),
        lambda members, tokens: 2 * max((link(*pair) for pair in combinations(members, 2)), default=0.0),
        lambda source, members, tokens: max((link(source, rank) for rank in members if rank != source), default=0.0),
    )
