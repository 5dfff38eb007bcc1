"""The slot cache under random holds, predictions, failures and ends, with each policy."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.demand.policies import PolicyChoice
from scheduler.model.ring import Ring, smallest
from scheduler.neurons.importance import NeuronImportance
from scheduler.slots.cache import SlotCache, Source
from scheduler.slots.cyclic import CyclicShelf
from scheduler.slots.shelf import Load, PriorityShelf
from scheduler.slots.stats import LoadStats
from scheduler.slots.table import SlotTable
from scheduler.slots.workers import Readers
from tests.support.slots import table_faults
from tpi.devices.pages import PAGE
from tpi.errors import TpiError

HALF = -2  # what memory holds while it is written


class Memory(Source):
    """A source that writes each unit's number to its slot, in two steps, and fails on request."""

    def __init__(self, size: int) -> None:
        self.cells = np.full(size, -1)
        self.faults = 0

    def fill(self, loads: Sequence[Load], part: int) -> int:
        for load in loads:
            for unit, place in load.shelf.targets(load):
                self.cells[place] = HALF
                time.sleep(0)
                if self.faults:
                    self.faults -= 1
                    raise OSError(f"unit {unit} failed")
                self.cells[place] = unit
        return len(loads)


class Equal(PriorityShelf[Any]):
    """A shelf of equal slots, evicted by priority."""

    def targets(self, load: Load) -> list[tuple[int, int]]:
        return list(zip(load.units.tolist(), load.slots.tolist(), strict=True))

    def right(self, cells: np.ndarray, units: Any, slots: Any) -> bool:
        return bool((cells[slots] == units).all())


class Cyclic(CyclicShelf):
    """A shelf that is a ring, in pages."""

    def __init__(self, ring: Ring, sizes: list[int]) -> None:
        super().__init__(ring)
        self._ring, self._sizes = ring, sizes

    def name_of(self, unit: int) -> str:
        return f"unit {unit}"

    def load_of(self, use: int, place: int) -> Load:
        return Load(self, use, place)

    def targets(self, load: Load) -> list[tuple[int, slice]]:
        return [(self._units[load.slots], self._place(load.slots))]

    def right(self, cells: np.ndarray, units: Any, slots: int) -> bool:
        return bool((cells[self._place(slots % self.cycle.period)] == units[0]).all())

    def _place(self, place: int) -> slice:
        begin = self._ring.offsets[place] // PAGE
        return slice(begin, begin + self._sizes[self._units[place]] // PAGE)


class SlotCacheMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["cyclic", "lfu", "importance"]),
        units=st.integers(1, 12),
        slots=st.integers(1, 8),
        threads=st.integers(1, 3),
        seed=st.integers(0, 1 << 16),
    )
    def start(self, policy: str, units: int, slots: int, threads: int, seed: int) -> None:
        self.random, self.units, stats = np.random.default_rng(seed), units, LoadStats()
        self.shelf: Any
        if policy == "cyclic":
            threads = 1  # loads of one place must end in order
            sizes = [PAGE * int(size) for size in self.random.integers(1, 4, units)]
            ring = smallest(list(range(units)), sizes, min(slots, 4))
            self.shelf, size = Cyclic(ring, sizes), ring.size // PAGE
        elif policy == "lfu":
            order = PolicyChoice("aged").open(np.zeros(units, np.int64))
            self.shelf, size = Equal("shelf", SlotTable(units, slots), order.priority, stats), slots
        else:
            priority = NeuronImportance(self.random.random(units)).priority
            self.shelf, size = Equal("shelf", SlotTable(units, slots, np.int32), priority, stats), slots
        self.memory, self.before = Memory(size), set(threading.enumerate())
        self.cache = SlotCache(self.memory, Readers(threads), stats)
        if policy == "cyclic":
            with self.cache.lock:
                self.cache.submit(self.shelf.resume(), ahead=True)
        self.held: list[tuple[Any, Any]] = []
        self.expected: Any = None

    def _drawn(self, count: int) -> Any:
        if isinstance(self.shelf, Cyclic):
            return (int(self.random.integers(0, self.units)),)
        return self.random.permutation(self.units)[: min(count, self.units)].astype(self.shelf.table.slot_of.dtype)

    @rule(count=st.integers(0, 5), foretold=st.booleans())
    def hold(self, count: int, foretold: bool) -> None:
        units = self.expected if foretold and self.expected is not None else self._drawn(count)
        self.expected, faults = None, self.memory.faults
        try:
            slots = self.cache.enter(self.shelf, units)
        except OSError:
            assert faults or self.memory.faults == 0
        except TpiError:
            assert self.held or len(units) > len(self.memory.cells)  # only what is held is in the way
        else:
            assert self.shelf.right(self.memory.cells, units, slots)
            self.held.append((units, slots))

    @rule(count=st.integers(0, 5))
    def expect(self, count: int) -> None:
        if not isinstance(self.shelf, Cyclic):  # a cycle foretells itself
            self.expected = self._drawn(count)
            self.cache.expect(self.shelf, self.expected)

    @rule()
    def abandon(self) -> None:
        self.cache.abandon()
        self.expected = None

    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        if self.held:
            units, slots = self.held.pop(which % len(self.held))
            assert self.shelf.right(self.memory.cells, units, slots)
            self.cache.release(self.shelf, slots)

    @rule(count=st.integers(1, 3))
    def fail(self, count: int) -> None:
        self.memory.faults = count

    @rule()
    def drain(self) -> None:
        self.cache.drain()
        assert self.cache.queued == 0

    @invariant()
    def what_is_held_is_whole(self) -> None:
        for units, slots in getattr(self, "held", []):
            assert self.shelf.right(self.memory.cells, units, slots)

    @invariant()
    def the_index_has_no_faults(self) -> None:
        if hasattr(self, "cache") and isinstance(self.shelf, Equal):
            with self.cache.lock:
                assert not table_faults(self.shelf.table)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for _, slots in self.held:
                self.cache.release(self.shelf, slots)
            self.cache.abandon()
            self.cache.drain()
            if isinstance(self.shelf, Equal):
                assert not self.shelf.table.pins.any()
                assert not self.shelf.table.failed.any()
            self.cache.close()
            assert set(threading.enumerate()) <= self.before


TestSlotCacheMachine = SlotCacheMachine.TestCase
TestSlotCacheMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
