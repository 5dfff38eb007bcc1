"""The number of fetched experts, and Belady's policy with bypassing, compared with trying all possibilities."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.demand.choice.replay import Recording, bound, bound_with_bypass
from scheduler.model.experts.costs import ExpertCosts, divide
from scheduler.model.experts.forecast import ExpertWork, best_demand, demand_pays_until
from scheduler.model.machine import LAPTOP, DeviceLink, NodeMachine, Rates
from scheduler.model.offload.choice import choose
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.problem import Limits, Problem
from scheduler.model.offload.tasks import Tasks
from scheduler.model.offload.work import NodeWork, SegmentWork, StepSize, Workload
from tpi.errors import PlanError

SECONDS = st.floats(0.0, 1.0)
MIB = 1 << 20
ANYTHING = Limits()
LAYERS, EXPERTS, USED, EACH, SHARED = 4, 16, 2, 2 * MIB, MIB


def finish(costs: ExpertCosts, there: list[float], absent: list[float], fetched: int) -> float:
    """Return the time at which both sides have finished, by a simple formula."""
    sides = []
    if there or fetched:
        now = costs.before
        if there:
            now += costs.accelerator.start + sum(costs.computing(costs.accelerator, tokens) for tokens in there)
        for number in range(fetched):
            now = max(now, (number + 1) * costs.copying) + costs.accelerator.start
            now += costs.computing(costs.accelerator, absent[number])
        sides.append(now)
    if absent[fetched:]:
        sides.append(costs.host.start + sum(costs.computing(costs.host, tokens) for tokens in absent[fetched:]))
    return max(sides, default=0.0)


@given(
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    st.lists(st.integers(1, 40), max_size=5),
    st.lists(st.integers(1, 40), max_size=6),
    st.none() | st.integers(0, 6),
)
def test_no_other_number_of_fetched_experts_is_sooner(
    drawn: tuple[float, ...], there: list[int], absent: list[int], most: int | None
) -> None:
    host, accelerator, link, start, latency, before = drawn
    costs = ExpertCosts(
        Rates(1 / (host + 0.01), 1e3, start), Rates(1 / (accelerator + 0.01), 1e5, start / 4),
        DeviceLink(1 / (link + 0.01), 1.0, latency), 1, 7, before,
    )  # fmt: skip
    have, lack = [float(tokens) for tokens in there], [float(tokens) for tokens in absent]
    found = divide(costs, have, lack, most)
    ways = [
        finish(costs, have, lack, count) for count in range(min(len(lack), len(lack) if most is None else most) + 1)
    ]
    assert found.seconds == pytest.approx(min(ways))
    assert ways[found.fetched] == pytest.approx(min(ways))
    assert all(way > found.seconds * (1 - 1e-6) for way in ways[: found.fetched])


def test_one_expert_is_fetched_if_that_is_sooner_than_the_cpu() -> None:
    """The comparison is t_copy + t_gpu against t_cpu."""
    slow, fast = (
        replace(LAPTOP, accelerator=replace(LAPTOP.cards[0], link=DeviceLink(up, up))) for up in (12e9, 100e9)
    )
    assert divide(ExpertCosts.of(slow, EACH, EACH, 0), [], [1.0]).fetched == 0
    assert divide(ExpertCosts.of(fast, EACH, EACH, 0), [], [1.0]).fetched == 1
    many = divide(ExpertCosts.of(slow, EACH, EACH, 0), [], [512.0])  # a prompt's worth: arithmetic decides
    assert many.fetched == 1


def test_costs_need_an_accelerator() -> None:
    with pytest.raises(PlanError, match="name one with --device"):
        ExpertCosts.of(replace(LAPTOP, accelerator=None), 1, 1, 1)


@pytest.mark.parametrize("seed", range(40))
def test_belady_with_bypass_is_the_best_of_all_choices(seed: int) -> None:
    random = Random(seed)
    units, slots = 5, random.randint(1, 3)
    uses = [tuple(random.sample(range(units), random.randint(1, 2))) for _ in range(7)]
    first = tuple(random.sample(range(units), slots))

    @cache
    def most(at: int, there: tuple[int, ...]) -> int:
        if at == len(uses):
            return 0
        after = combinations(sorted({*there, *uses[at]}), slots)
        return sum(unit in there for unit in uses[at]) + max(most(at + 1, kept) for kept in after)

    recording = Recording(np.zeros(units, np.int64), tuple((np.array(use, np.int64),) for use in uses))
    found = bound_with_bypass(recording, np.array(first, np.int64))
    assert found.hits == most(0, tuple(sorted(first)))
    assert found.uses == sum(map(len, uses))
    assert found.loads is not None
    if slots > 1:
        assert found.hits >= bound(recording, slots).hits


def split_routed(work: NodeWork) -> NodeWork:
    """Return the same work with each block's routed experts in a segment of their own, after its other segments."""

    def parts(segment: SegmentWork) -> Iterator[SegmentWork]:
        routed = segment.weights * segment.routed // max(1, segment.nbytes)
        if segment.nbytes > segment.routed:
            unrouted = segment.nbytes - segment.routed
            yield replace(segment, nbytes=unrouted, weights=segment.weights - routed, routed=0)
        if segment.routed:
            yield replace(segment, nbytes=segment.routed, weights=routed)

    return replace(work, segments=tuple(part for segment in work.segments for part in parts(segment)))


def problem_of(memory: int, machine: NodeMachine = LAPTOP, limits: Limits = ANYTHING) -> Problem:
    """Return layers of attention and experts, some of them shared."""
    segments: list[SegmentWork] = []
    for layer in range(LAYERS):
        segments.append(SegmentWork(2 * layer, "attention", MIB, MIB, 1024, 4096))
        nbytes = SHARED + EXPERTS * EACH
        segments.append(SegmentWork(2 * layer + 1, "ffn", nbytes, nbytes, routed=EXPERTS * EACH, chosen=USED / EXPERTS))
    work = split_routed(NodeWork(tuple(segments), 8192))
    (card,) = machine.cards
    return Problem(
        work,
        replace(machine, accelerator=replace(card, memory=memory)),
        Workload(64, 64, 1, 256),
        Needs(1 << 10),
        limits,
    )


WORK = ExpertWork(LAYERS, EXPERTS, USED, EACH, EACH, SHARED)


def even(slots: int) -> float:
    return slots / WORK.units


def test_routed_experts_become_segments_of_their_own() -> None:
    segments = problem_of(64 * MIB).work.segments
    assert [segment.nbytes for segment in segments[:3]] == [MIB, SHARED, EXPERTS * EACH]
    assert [segment.routed for segment in segments[:3]] == [0, 0, EXPERTS * EACH]
    assert sum(segment.weights for segment in segments) == LAYERS * (MIB + SHARED + EXPERTS * EACH)


def test_what_is_left_beside_everything_else_is_slots() -> None:
    found = best_demand(problem_of(64 * MIB), WORK, even)
    assert found is not None
    taken = found.peaks.accelerator.total
    assert taken <= 64 * MIB < taken + 2 * WORK.slot_bytes
    assert found.peaks.accelerator.slots >= found.slots * WORK.slot_bytes
    assert found.hit_rate == even(found.slots)
    assert found.fetched + found.computed_on_host + found.hit_rate == pytest.approx(1)


def test_more_memory_and_a_better_policy_make_tokens_sooner() -> None:
    def token(memory: int, times: float) -> float:
        found = best_demand(problem_of(memory * MIB), WORK, lambda slots: times * even(slots))
        assert found is not None
        return found.token_seconds

    seconds = [token(32, 1.0), token(64, 1.0), token(64, 1.5), token(1024, 1.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.3 * seconds[-1]


def test_repeated_choices_are_faster_on_demand_than_fixed() -> None:
    problem = problem_of(64 * MIB)
    found = best_demand(problem, WORK, lambda _: 0.9)
    assert found is not None
    assert found.seconds < choose(problem).seconds


@pytest.mark.parametrize(
    ("memory", "limits", "ram"),
    [(8, Limits(), 1 << 40), (64, Limits(weights="ram"), 1 << 40), (64, Limits(decode="accelerator"), 1 << 40),
     (64, Limits(), 64 << 20)],
)  # fmt: skip
def test_demand_is_not_used_if_memory_is_short_or_flags_forbid(memory: int, limits: Limits, ram: int) -> None:
    assert best_demand(problem_of(memory * MIB, replace(LAPTOP, memory=ram), limits), WORK, even) is None


def test_long_steps_are_those_that_the_other_way_is_faster_for() -> None:
    found = best_demand(problem_of(96 * MIB, limits=Limits(prompt="accelerator")), WORK, even)
    assert found is not None
    slow = problem_of(96 * MIB, replace(LAPTOP, host=Rates(LAPTOP.host.read / 8, LAPTOP.host.operations / 8)))
    first, sooner = (demand_pays_until(problem, WORK, found) for problem in (problem_of(96 * MIB), slow))
    assert 1 < sooner <= first < 512


def test_the_bus_carries_what_the_host_computes_of_experts() -> None:
    """Only the chosen experts count, which are few."""
    few = Tasks.of(problem_of(64 * MIB, replace(LAPTOP, bus=40e9)).work, replace(LAPTOP, bus=40e9), StepSize(1, 1, 64))
    routed = few.weights_bus > few.host_bus * 1.01
    assert routed.sum() == LAYERS
    assert few.host_bus[routed] == pytest.approx(USED * EACH / 40e9)
