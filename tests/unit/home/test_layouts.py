"""The search for stages: as good as the best of all layouts of a small home, within memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model.home.layouts import best_layout, evaluate, layouts, pure_layouts
from scheduler.model.home.problem import Members, UnitKind
from scheduler.model.home.stages import LayerWork, StageProblem, rows_cost
from tests.support.homes import MB, ROOM, home
from tpi.errors import PlanError

SPEEDS = st.sampled_from([0.5e9, 1e9, 4e9])
NEAR = st.sampled_from([0.0, 0.0005, 0.01, 0.2])


def groupings(ranks: tuple[int, ...]) -> Iterator[list[Members]]:
    """Yield every division of all or some of the ranks into ordered groups."""
    yield []
    for size in range(1, len(ranks) + 1):
        for group in combinations(ranks, size):
            for others in groupings(tuple(rank for rank in ranks if rank not in group)):
                yield [group, *others]


def every_layout(problem: StageProblem) -> Iterator[tuple[float, set[int]]]:
    """Yield the seconds of every layout that fits, and its nodes."""
    inner = problem.cuts[1:-1]
    for groups in groupings(problem.everyone):
        for cuts in combinations(inner, len(groups) - 1) if groups else ():
            ends = pairwise([0, *cuts, problem.cuts[-1]])
            found = evaluate(problem, [(*end, group) for end, group in zip(ends, groups, strict=True)])
            if found is not None:
                yield found.seconds, set(found.members)


@given(st.lists(SPEEDS, min_size=1, max_size=3), st.lists(NEAR, min_size=3, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_other_layout_is_faster(speeds: list[float], apart: list[float], uneven: bool) -> None:
    links = dict(zip([(0, 1), (0, 2), (1, 2)], apart, strict=True))
    problem = home(speeds, links, layers=3, cuts=(0, 2, 3) if uneven else ())
    every = list(every_layout(problem))
    workers = set(range(1, len(speeds)))
    # stages that are even may be preferred to slightly faster ones
    assert layouts(problem)[0].seconds <= 1.01 * min(seconds for seconds, _ in every)
    fastest = layouts(problem, drop=False)[0]
    assert fastest.seconds <= 1.01 * min(seconds for seconds, members in every if members >= workers)
    assert workers <= set(fastest.members)
    plain = layouts(problem, several=False)
    assert all(len(each.stages) == 1 and 0 in each.members for each in plain)


@given(st.lists(st.tuples(SPEEDS, st.sampled_from([30 * MB, 60 * MB, ROOM])), min_size=2, max_size=3), NEAR)
@settings(max_examples=25, deadline=None)
def test_layouts_keep_within_memory_or_wait_for_disks(nodes: list[tuple[float, int]], apart: float) -> None:
    problem = home([speed for speed, _ in nodes], apart, layers=3, rooms=[room for _, room in nodes])
    every = list(every_layout(problem))
    if not every:
        with pytest.raises(PlanError, match="give a smaller -c"):
            best_layout(problem)
        return
    assert layouts(problem)[0].seconds <= 1.05 * min(seconds for seconds, _ in every)


def test_stages_hold_every_layer_once_and_each_node_is_in_one() -> None:
    for found in layouts(home([1e9, 2e9, 3e9, 1e9], 0.004, layers=9), drop=False):
        ends = [0, *(stage.last for stage in found.stages)]
        assert [stage.first for stage in found.stages] == ends[:-1]
        assert ends[-1] == 9
        ranks = [rank for stage in found.stages for rank in stage.split.members]
        assert len(set(ranks)) == len(ranks)
        assert found.seconds == pytest.approx(found.compute + found.exchange + found.hops + found.disk)


def test_wired_pairs_become_the_groups() -> None:
    """Two pairs of machines, each joined by a cable, with Wi-Fi between the pairs."""
    wired, wifi = 0.00005, 0.01
    links = {pair: wired if pair in ((0, 2), (1, 3)) else wifi for pair in combinations(range(4), 2)}
    best = best_layout(home([0.3e9] * 4, links, layers=8), drop=False)
    assert {stage.split.members for stage in best.stages} == {(0, 2), (1, 3)}
    assert [stage.last - stage.first for stage in best.stages] in ([4, 4], [5, 3], [3, 5])


def test_far_nodes_take_layers_rather_than_shares_and_near_ones_shares() -> None:
    far, near = (best_layout(home([1e9] * 4, apart, layers=8), drop=False) for apart in (0.01, 1e-6))
    assert len(far.stages) > 1
    assert [stage.split.members for stage in near.stages] == [(0, 1, 2, 3)]


def test_one_stage_stays_unless_another_layout_is_faster_by_a_margin() -> None:
    problem = home([1e9, 1e9], 0.0, layers=2)
    one, two = (next(each for each in layouts(problem, False) if len(each.stages) == count) for count in (1, 2))
    level = (two.seconds - one.seconds) / one.problem.layers[0].sums / 2  # a sum's seconds for which both are equal

    def stays(seconds: float) -> bool:
        slower = replace(problem, exchange=lambda members, tokens: seconds if len(members) > 1 else 0.0)
        return best_layout(slower, drop=False).stages[0].split.members == (0, 1)

    assert stays(level + 0.02 * two.seconds / 4)
    assert not stays(level + 0.04 * two.seconds / 4)


def test_a_master_without_layers_computes_the_head_alone() -> None:
    problem = home([1e6, 1e9], 0.001)
    best = best_layout(problem)
    assert best.members == (1,)
    assert best.hops == pytest.approx(0.002)
    assert best.turn == problem.nodes[0].turn


def test_the_pure_forms_use_every_node() -> None:
    one, singles = pure_layouts(home([1e9, 2e9, 1e9], 0.001, layers=6))
    assert one is not None
    assert singles is not None
    assert [stage.split.members for stage in one.stages] == [(0, 1, 2)]
    assert sorted(stage.split.members for stage in singles.stages) == [(0,), (1,), (2,)]


def test_streams_fill_the_stages_and_drafts_pay_where_hops_are_long() -> None:
    _, singles = pure_layouts(home([1e9] * 4, 0.004, layers=8))
    one = best_layout(home([1e9], 0.0, layers=8))
    assert singles is not None
    assert singles.streams(1) == pytest.approx(singles.seconds)
    assert 3.0 < singles.seconds / singles.streams(4) <= 4.0
    assert singles.prompt(256) < 0.5 * sum(singles.step(32) for _ in range(8))
    assert 1.0 <= one.drafted(0.5) < singles.drafted(0.5) < singles.drafted(0.8)


def test_rows_cost_what_was_measured() -> None:
    assert [rows_cost(rows) for rows in (1, 2, 8, 16)] == pytest.approx([1, 1.09, 2.3, 4.35])
    assert rows_cost(4) < rows_cost(5) < rows_cost(6)


def test_a_choice_of_experts_reads_more_for_more_tokens() -> None:
    experts = UnitKind("experts", 8, 1, 8 * MB, MB)
    dense = UnitKind("neurons", 8, 1, MB, MB)
    work = {kind.kind: (LayerWork((kind,), 2),) * 2 for kind in (experts, dense)}
    found = {name: best_layout(replace(home([1e9], 0.0, layers=2), layers=layers)) for name, layers in work.items()}
    assert found["experts"].step(1) == pytest.approx(found["neurons"].step(1))
    assert found["experts"].step(4) > 2 * found["neurons"].step(4)


@pytest.mark.parametrize("alike", [True, False])
def test_many_nodes_are_laid_out_whether_alike_or_not(alike: bool) -> None:
    speeds = [1e9 if alike else (1 + rank / 10) * 1e9 for rank in range(12)]
    problem = home(speeds, 0.01, layers=24)
    found = best_layout(problem, drop=False)
    assert set(found.members) >= set(range(1, 12))
    one, _ = pure_layouts(problem)
    assert one is not None
    assert found.seconds < one.seconds
