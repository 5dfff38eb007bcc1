"""The policies of a group's nodes: one micro-batch size for all, which suits all of them best."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.model.offload.work import REQUEST_PHASES
from scheduler.model.roofline.latency import PolicyPoint, roofs, seconds
from scheduler.model.roofline.policy import BatchProblem, SumCost
from scheduler.model.roofline.search import GAP, best_policies, best_policy
from tests.support.roofline import fits, paper, problems
from tpi.errors import PlanError


def slowest(nodes: list[BatchProblem], batch: int, parts: int) -> float | None:
    """Return the seconds per sequence of the slowest node; None if the sequences do not fit on all nodes."""
    found = []
    for problem in nodes:
        limits = replace(problem.limits, batch=batch, micro_batches=parts)
        try:
            policy = best_policy(replace(problem, limits=limits)).policy
        except PlanError:
            return None
        found.append(seconds(problem, policy) / batch)
    return max(found)


@given(problems(), problems(), st.sampled_from([SumCost(), SumCost(0.5, 0.2)]))
@settings(max_examples=4, deadline=None)
def test_no_other_size_suits_all_nodes_better(one: BatchProblem, two: BatchProblem, sums: SumCost) -> None:
    nodes = [replace(one, sums=sums), replace(two, request=one.request, sums=sums)]
    every = [
        found
        for batch in range(1, one.request.most + 1)
        for parts in range(1, batch + 1)
        if (found := slowest(nodes, batch, parts)) is not None
    ]
    try:
        policies = best_policies(nodes).policies
    except PlanError:
        assert not every
        return
    assert len({(policy.batch, policy.micro_batches) for policy in policies}) == 1
    assert all(fits(problem, policy) for problem, policy in zip(nodes, policies, strict=True))
    worst = max(seconds(problem, policy) / policy.batch for problem, policy in zip(nodes, policies, strict=True))
    assert worst <= min(every) * (1 + 2 * GAP)


@given(problems())
@settings(max_examples=6, deadline=None)
def test_nodes_that_are_alike_do_as_one_alone(problem: BatchProblem) -> None:
    try:
        alone = best_policy(problem).policy
    except PlanError:
        assume(False)
    assert best_policies([problem] * 3).policies == (alone,) * 3


def test_the_node_with_the_least_room_bounds_the_batch() -> None:
    large = paper("t4", 504)
    small = replace(large, machine=replace(large.machine, memory=88 << 30))
    together = best_policies([large, small]).policies
    assert together[0].batch == together[1].batch <= best_policy(small).policy.batch
    assert together[0].batch < best_policy(large).policy.batch


@pytest.mark.parametrize("attention", [0, 1])
def test_sums_are_a_roof_and_wait_where_micro_batches_are_few(attention: int) -> None:
    problem = replace(paper("t4", 64), sums=SumCost(1e-3, 1e-5))
    for parts in (1, 8):
        at = PolicyPoint(64.0, float(parts), attention, 1)
        found = {phase: roofs(problem, at, phase) for phase in REQUEST_PHASES}
        assert float(found["decode"]["sums"]) == pytest.approx(2 * (parts * 1e-3 + 64 * 1e-5))
        assert float(found["prompt"]["sums"]) > float(found["decode"]["sums"])
        beside = float(found["decode"]["sums"]) + float(found["decode"]["accelerator"])
        assert (float(found["decode"]["turns"]) >= beside) == (parts == 1)
    assert "sums" not in roofs(paper("t4", 64), PolicyPoint(64.0, 1.0, attention, 1), "decode")
