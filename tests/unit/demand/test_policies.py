"""Policies compared with the optimum, found by trying everything; the chosen policy; where LRU finds nothing."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.demand.choice.cliff import without_lru_cliff
from scheduler.demand.choice.replay import Recording, bound, replay
from scheduler.demand.choice.select import candidates, select
from scheduler.demand.policies import Importance, Lfu, PolicyChoice
from scheduler.slots.table import SlotTable
from tests.support.recordings import record
from tpi.errors import PlanError

BLOCKS = np.array([0, 0, 0, 1, 1, 1])
USES = st.one_of(st.sets(st.integers(0, 2), min_size=1, max_size=2), st.sets(st.integers(3, 5), min_size=1, max_size=2))


def recorded(uses: list[set[int]]) -> Recording:
    return Recording(BLOCKS, tuple((np.array(sorted(use)),) for use in uses))


def fewest_misses(uses: list[set[int]], slots: int) -> int:
    """Return the fewest loads with which every use finds its units, by trying every cache after every use."""

    @cache
    def after(at: int, there: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        want = frozenset(uses[at])
        others = there - want
        room = slots - len(want)
        kept = [frozenset(some) for count in range(min(room, len(others)) + 1) for some in combinations(others, count)]
        return len(want - there) + min(after(at + 1, want | some) for some in kept)

    return after(0, frozenset())


@given(st.lists(USES, min_size=1, max_size=10), st.integers(2, 5))
def test_belady_is_the_best_there_is_and_no_policy_beats_it(uses: list[set[int]], slots: int) -> None:
    recording = recorded(uses)
    best = bound(recording, slots)
    assert best.uses - best.hits == fewest_misses(uses, slots)
    for choice in candidates(recording, slots):
        assert replay(recording, choice.open(BLOCKS), slots).hits <= best.hits


def cyclic(steps: int, blocks: int = 4, hot: int = 1) -> Recording:
    """Return steps that use unit 0 of every block, and one of three others in turn."""
    keys = [(block, unit) for block in range(blocks) for unit in range(hot + 3)]
    return record(keys, [[(b, u) for b in range(blocks) for u in (0, hot + at % 3)] for at in range(steps)])


def test_lru_keeps_nothing_below_one_steps_units_and_others_do() -> None:
    recording = cyclic(40)
    assert recording.units_per_step == 8
    found = {
        choice.kind: replay(recording, choice.open(recording.blocks), 7).hits for choice in candidates(recording, 7)
    }
    assert found["lru"] == 0
    assert found["lfu"] >= 4 * 38
    chosen = select(recording, 7)
    assert chosen.choice.kind != "lru"
    assert chosen.hit_rate is not None
    assert 0.45 < chosen.hit_rate <= chosen.best


@pytest.mark.parametrize("slots", [5, 300])
def test_the_least_worth_goes_first(slots: int) -> None:
    """With few and many slots, and with many units of equal worth."""
    random = np.random.default_rng(slots)
    table, policy = SlotTable(2 * slots, slots), Lfu(2 * slots)
    table.place(random.permutation(2 * slots)[:slots], np.arange(slots))
    table.end(np.arange(slots), arrived=True)
    policy._score[:] = random.integers(0, 4, 2 * slots)
    order = np.argsort(policy.priority(table.unit_of), kind="stable")
    for count in (1, 3, slots // 2, slots, slots + 1):
        assert table.least(count, policy.priority).tolist() == order[:count].tolist()


def test_the_cliff_is_guarded() -> None:
    lru = PolicyChoice("lru")
    assert without_lru_cliff(lru, 40, 64).kind == "importance"
    assert without_lru_cliff(lru, 64, 64) is lru


def test_bytes_and_hits_are_of_the_recording() -> None:
    recording = record([(0, 0), (0, 1)], [[(0, 0), (0, 0)], [(0, 1)], [(0, 1)], []])
    found = replay(recording, PolicyChoice("lru").open(recording.blocks), 1, unit_bytes=100)
    assert (found.hits, found.uses, found.steps) == (1, 3, 4)
    assert found.hit_rate == pytest.approx(1 / 3)
    assert found.bytes_per_step == pytest.approx(50)


def test_a_use_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="2 units are used at once, and the cache has room for 1"):
        bound(record([(0, 0), (0, 1)], [[(0, 0), (0, 1)]]), 1)


def test_importance_is_prediction_and_frequency() -> None:
    policy = Importance(BLOCKS, half_life=8, weight=0.5)
    for _ in range(200):
        policy.begin()
        policy.use(np.array([0]))
        policy.use(np.array([3, 4]))
    policy.expect(np.array([1]))
    np.testing.assert_allclose(policy.priority(np.arange(6)), [0.5, 1, 0, 1.5, 1.5, 0], atol=0.01)


def test_aged_counts_halve() -> None:
    aged = PolicyChoice("aged", half_life=4).open(BLOCKS)
    for step in range(400):
        aged.begin()
        if step % 8 == 7:
            aged.use(np.array([0]))
    aged.use(np.array([1]))
    first = aged.priority(np.array([0, 1]))
    for _ in range(4):
        aged.begin()
    np.testing.assert_allclose(aged.priority(np.array([0, 1])), first / 2, rtol=1e-6)


def test_what_is_pinned_stays() -> None:
    pinned = PolicyChoice("pins", pinned=(0, 3)).open(BLOCKS)
    pinned.use(np.array([1, 2]))
    priority = pinned.priority(np.arange(6))
    assert set(np.argsort(-priority)[:2]) == {0, 3}


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="is not possible"):
        PolicyChoice("aged", half_life=0).open(BLOCKS)
