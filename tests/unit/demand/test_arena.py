"""The first contents of an accelerator's slots, the predictions of routers, and when routers are asked."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.demand.choice.first import trained_policy, units_to_keep
from scheduler.demand.loads import IdleUnlessDemanded, ReadAheadQueue
from scheduler.demand.policies import Key, PolicyChoice
from scheduler.model.experts.costs import ExpertCosts
from scheduler.model.machine import LAPTOP
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.workers import QueueWorkers
from tests.support.devices.twin import Twin
from tests.support.kernels.kernel_cases import native
from tests.support.recordings import record
from tpi.devices.pages import PAGE
from tpi.kernels.spec import F32
from worker.demand.arena import ExpertArena

BLOCKS, EXPERTS = (1, 3), 4
KEYS: list[Key] = [(block, expert) for block in BLOCKS for expert in range(EXPERTS)]
ONE = np.zeros((1, 8), np.float32)


class Foretelling:
    """Kernels whose routers give set answers; `asked` counts the calls."""

    def __init__(self, chosen: list[int]) -> None:
        self.chosen, self.asked = chosen, 0
        self.failing = False

    def route(self, router: Any, x: F32) -> Any:
        self.asked += 1
        if self.failing:
            raise OSError("a router failed")
        return SimpleNamespace(experts=np.array([self.chosen], np.int32))


@contextmanager
def arena_of(slots: int, kernels: Foretelling, in_time: bool = True) -> Iterator[ExpertArena]:
    """Return an arena with some experts of blocks 1 and 3, each a page filled with its number."""
    units = {key: np.full(PAGE, number, np.uint8) for number, key in enumerate(KEYS)}
    with Twin(native) as device, closing(TransferQueue()) as queue:
        memory = device.memory.allocate(slots * PAGE)
        costs = ExpertCosts.of(LAPTOP, PAGE, PAGE, 0)
        with closing(ExpertArena(device, memory, units, costs, queue)) as arena:
            device.kernels = kernels  # type: ignore[assignment]
            arena.routers |= dict.fromkeys(BLOCKS, None)  # type: ignore[arg-type]
            arena._gaps = SimpleNamespace(  # type: ignore[assignment]
                asked=lambda loads: None, loaded=lambda: None, usual=1e9 if in_time else 0.0
            )
            yield arena
        device.memory.free(memory)


def test_as_many_of_every_layer_lie_there_where_nothing_is_known() -> None:
    first = units_to_keep(trained_policy(PolicyChoice("importance"), KEYS), KEYS, 5)
    assert first == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)]


@pytest.mark.parametrize("kind", ["lru", "lfu", "aged", "importance"])
def test_what_was_recorded_to_be_used_lies_there_first(kind: str) -> None:
    recording = record(KEYS, [[(1, 3), (3, 0)], [(1, 3), (3, 2)], [(1, 3), (3, 2)]])
    policy = trained_policy(PolicyChoice(kind), KEYS, recording)  # type: ignore[arg-type]
    assert units_to_keep(policy, KEYS, 2) == [(1, 3), (3, 2)]
    assert units_to_keep(policy, KEYS, 3) == [(1, 3), (3, 0), (3, 2)]


def test_the_next_blocks_router_has_its_experts_come() -> None:
    kernels = Foretelling([2, 3])
    with arena_of(4, kernels) as arena:
        arena.begin(short=True)
        arena.prefetch_next(1, ONE)
        arena.wait()
        arena.cache.slots._workers._asked[-1].join()  # type: ignore[attr-defined]
        held = arena.share(3, {2: 1, 3: 1})
        assert {*held.ready, *held.loading} == {(3, 2), (3, 3)}
        assert all((held.data(key) == KEYS.index(key)).all() for key in [*held.ready, *held.loading])
        held.close()
        assert (kernels.asked, arena.cache.stats().ahead) == (1, 2)


@pytest.mark.parametrize(
    ("block", "tokens", "short", "in_time"),
    [(3, 1, True, True), (1, 500, True, True), (1, 1, False, True), (1, 1, True, False)],
)
def test_routers_are_not_asked_in_vain(block: int, tokens: int, short: bool, in_time: bool) -> None:
    """Not after the last block, not in prompts, and not if the link is too slow for the predicted experts."""
    kernels = Foretelling([2])
    with arena_of(4, kernels, in_time) as arena:
        arena.begin(short)
        arena.prefetch_next(block, np.zeros((tokens, 8), np.float32))
        arena.wait()
        assert kernels.asked == 0


def test_a_router_that_fails_says_so_at_the_next_block() -> None:
    kernels = Foretelling([2])
    with arena_of(4, kernels) as arena:
        arena.begin(short=True)
        kernels.failing = True
        arena.prefetch_next(1, ONE)
        with pytest.raises(OSError, match="a router failed"):
            arena.prefetch_next(3, ONE)
        arena.prefetch_next(1, ONE)
        arena.abandon()
        arena.wait()


def test_a_prompt_uses_what_is_there_and_changes_nothing() -> None:
    with arena_of(4, Foretelling([])) as arena:
        arena.begin(short=False)
        held = arena.share(1, dict.fromkeys(range(EXPERTS), 100))
        assert (len(held.ready), held.loading, len(held.left_out)) == (2, [], 2)
        held.close()
        stats = arena.cache.stats()
        assert (stats.uses, stats.steps, stats.read_bytes) == (0, 0, 0)


def test_a_slow_link_is_not_asked_for_more_than_waits_for_it() -> None:
    """However many tokens pass meanwhile, and whatever is predicted."""
    free = Event()
    with arena_of(4, Foretelling([])) as arena:
        workers = arena.cache.slots._workers
        assert isinstance(workers, QueueWorkers)
        workers._queue.submit("weight load", "a long one", lambda: _wait(free))
        try:
            for token in range(100):
                arena.begin(short=True)
                for block in BLOCKS:
                    arena.share(block, {token % EXPERTS: 1, (token + 1) % EXPERTS: 1}).close()
                    arena.cache.expect([(4 - block, expert) for expert in range(EXPERTS)])
            assert len(workers._asked) < 4 * len(KEYS)
        finally:
            free.set()


def _wait(free: Event) -> None:
    assert free.wait(60)


def test_a_patient_link_is_idle_unless_something_is_demanded() -> None:
    link = IdleUnlessDemanded()
    link.asked(loads=False)
    assert link.room(0.0, 1 << 30) == float("inf")
    link.asked(loads=True)
    link.asked(loads=False)
    assert link.room(1e9, 0) == 0.0
    link.loaded()
    assert link.room(1e9, 0) == float("inf")


def test_what_comes_first_is_kept_in_mind_before_the_others() -> None:
    waiting = ReadAheadQueue()
    waiting.add([1, 2])
    waiting.add_first([3, 2])
    assert [waiting.pop(lambda unit: unit == 3) for _ in range(3)] == [2, 1, None]
    waiting.add_first(list(range(200)))
    assert len(waiting) < 100
