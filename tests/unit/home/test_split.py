"""The split over uneven nodes: as good as the best of all splits, within each memory, without nodes that slow it."""

from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.home.problem import HomeNode, HomeProblem, Members, UnitKind
from scheduler.model.home.solve import best_split, split_over
from tpi.errors import PlanError

SPEEDS = st.sampled_from([0.5e9, 1e9, 2e9, 4e9])
MEMORIES = st.sampled_from([1_000_000_000, 4_000_000_000])
MB = 1_000_000


def home(
    speeds: list[float], memories: list[int], latency: float, heads: int = 3, neurons: int = 4, used: float = 1.0
) -> HomeProblem:
    """Return nodes with these speeds and memories.

    Sums take `latency` for each further node; a token reads `used` of neurons.
    """
    nodes = tuple(
        HomeNode(f"node {rank}", speed, 0.5e9, memory, 100 * MB, 0.0 if rank else 0.002)
        for rank, (speed, memory) in enumerate(zip(speeds, memories, strict=True))
    )
    dealt = (
        UnitKind("heads", heads, 10, 200 * MB, 200 * MB, 100 * MB),
        UnitKind("neurons", neurons, 10, 300 * MB, used * 300 * MB),
    )
    return HomeProblem(nodes, dealt, lambda members: latency * (len(members) - 1))


def deals(units: int, nodes: int) -> list[tuple[int, ...]]:
    """Yield every way to deal units to nodes."""
    return [counts for counts in product(range(units + 1), repeat=nodes) if sum(counts) == units]


def read_from_disk(own: tuple[tuple[int, UnitKind], ...], room: float) -> float:
    """Return the bytes that a token reads from disk if the first kinds leave memory first."""
    excess, read = sum(count * (kind.nbytes + kind.kv_bytes) for count, kind in own) - room, 0.0
    for count, kind in own:
        outside = min(max(0.0, excess), count * kind.nbytes)
        read += outside * min(1.0, kind.read / kind.nbytes)
        excess -= outside
    return read


def seconds(problem: HomeProblem, members: Members, dealt: tuple[tuple[int, ...], ...]) -> float | None:
    """Return the seconds of a token, computed independently; None if a memory does not hold keys and values."""
    compute, loading = problem.nodes[0].turn, 0.0
    for counts, kind in zip(dealt, problem.kinds, strict=True):
        compute += max(
            count * kind.read / problem.nodes[rank].read for count, rank in zip(counts, members, strict=True)
        )
    for position, rank in enumerate(members):
        node = problem.nodes[rank]
        own = [(counts[position], kind) for counts, kind in zip(dealt, problem.kinds, strict=True)]
        room = node.memory - node.fixed
        if sum(count * kind.kv_bytes for count, kind in own) > room:
            return None
        loading = max(loading, min(read_from_disk(order, room) for order in permutations(own)) / node.disk)
    return max(compute + problem.exchange(members), loading)


def best_of_all(problem: HomeProblem) -> float | None:
    ranks = range(1, len(problem.nodes))
    sets = [(0, *others) for size in range(len(problem.nodes)) for others in combinations(ranks, size)]
    found = [
        seconds(problem, members, dealt)
        for members in sets
        for dealt in product(*(deals(kind.units, len(members)) for kind in problem.kinds))
    ]
    return min((each for each in found if each is not None), default=None)


@given(
    st.lists(st.tuples(SPEEDS, MEMORIES), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.02, 0.2, 2.0]),
    st.sampled_from([1.0, 0.1]),
)
@settings(max_examples=40, deadline=None)
def test_no_other_split_is_faster(nodes: list[tuple[float, int]], latency: float, used: float) -> None:
    problem = home([speed for speed, _ in nodes], [memory for _, memory in nodes], latency, used=used)
    best = best_of_all(problem)
    if best is None:
        with pytest.raises(PlanError, match="give a smaller -c"):
            best_split(problem)
        return
    found = best_split(problem)
    assert found.seconds == pytest.approx(best, rel=5e-3)
    told = seconds(problem, found.members, tuple(found.units.values()))
    assert told is not None
    assert found.seconds == pytest.approx(told)
    assert [sum(counts) for counts in found.units.values()] == [kind.units for kind in problem.kinds]


def test_twice_as_fast_gets_twice_as_much() -> None:
    found = best_split(home([2e9, 1e9, 1e9], [8 << 30] * 3, 0.0, heads=16, neurons=32))
    assert found.members == (0, 1, 2)
    assert found.units == {"heads": (8, 4, 4), "neurons": (16, 8, 8)}


def test_a_node_whose_sums_cost_more_than_it_brings_is_left_out() -> None:
    def problem(far: float) -> HomeProblem:
        near = home([1e9, 1e9, 1e9], [8 << 30] * 3, 0.0, heads=12, neurons=12)
        return HomeProblem(near.nodes, near.kinds, lambda members: far if 2 in members else 0.0)

    assert best_split(problem(0.01)).members == (0, 1, 2)
    assert best_split(problem(10.0)).members == (0, 1)
    assert best_split(problem(10.0), drop=False).members == (0, 1, 2)


def test_what_a_memory_does_not_hold_goes_to_another() -> None:
    tight = home([1e9, 1e9], [700 * MB, 8 << 30], 0.0, heads=6, neurons=8)
    found = split_over(tight, (0, 1))
    assert found is not None
    first, second = (sum(counts[rank] for counts in found.units.values()) for rank in (0, 1))
    assert first < second


def test_many_nodes_are_dropped_one_after_the_other() -> None:
    speeds = [1e9] * 10 + [1e6] * 3
    found = best_split(home(speeds, [8 << 30] * 13, 0.05, heads=40, neurons=80))
    assert 1 < len(found.members) <= 10
    assert max(found.members) < 10
