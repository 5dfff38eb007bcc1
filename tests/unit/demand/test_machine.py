"""The demand cache under random holds, walks, hints, releases and disk failures, compared with the files."""

import threading
from contextlib import AbstractContextManager

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.demand.cache import DemandCache
from scheduler.demand.policies import Key, PolicyChoice
from scheduler.demand.sources import DiskUnits
from scheduler.slots.workers import Readers
from tests.support.devices.demanded import ShuffledDisk, content, files_of
from tests.support.slots import table_faults
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import TpiError, WeightsError

BLOCKS, UNITS = 3, 6
KEYS = st.tuples(st.integers(0, BLOCKS - 1), st.lists(st.integers(0, UNITS - 1), unique=True, max_size=UNITS))


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 12),
        size=st.sampled_from([64, 700, 5000]),
        threads=st.integers(1, 3),
        kind=st.sampled_from(["lru", "lfu", "aged", "importance"]),
        gap=st.sampled_from([0.0, 1e9]),
    )
    def start(self, slots: int, size: int, threads: int, kind: str, gap: float) -> None:
        files, extents = files_of(BLOCKS, UNITS, size)
        self.size, self.disk = size, ShuffledDisk(files, threads)
        source = DiskUnits(self.disk, extents)
        policy = PolicyChoice(kind).open(np.array([block for block, _ in source.keys]))  # type: ignore[arg-type]
        used = slots * source.slot_bytes
        self.beyond = page_buffer(used + 64)[: used + 64]
        self.beyond[used:] = 77
        self.now, self.gap, self.threads_before = 0.0, gap, set(threading.enumerate())
        self.cache = DemandCache(source, self.beyond[:used], policy, Readers(threads), clock=lambda: self.now)
        self.slots, self.used = slots, used
        self.held: list[tuple[AbstractContextManager[list[Bytes]], list[Key], list[Bytes]]] = []

    @rule(keys=KEYS)
    def hold(self, keys: tuple[int, list[int]]) -> None:
        wanted = [(keys[0], unit) for unit in keys[1]]
        hold = self.cache.hold(wanted)
        try:
            data = hold.__enter__()
        except WeightsError as error:
            self._check(f"block{keys[0]}.shard" in str(error))
        except TpiError:  # only where all that is held and wanted is more than there is room for
            distinct = {key for _, held, _ in self.held for key in held} | set(wanted)
            self._check(len(distinct) > self.slots)
        else:
            self.held.append((hold, wanted, data))
        self.now += self.gap

    @rule(keys=KEYS)
    def walk(self, keys: tuple[int, list[int]]) -> None:
        wanted = [(keys[0], unit) for unit in keys[1]]
        self.release_all()
        try:
            with self.cache.follow(wanted) as units:
                seen = [(key, data.tobytes()) for key, data in zip(wanted, units, strict=True)]
        except WeightsError as error:
            self._check(f"block{keys[0]}.shard" in str(error))
        else:
            self._check(all(data == content(key, self.size) for key, data in seen))

    @rule(keys=KEYS)
    def together(self, keys: tuple[int, list[int]]) -> None:
        wanted = [(keys[0], unit) for unit in keys[1]]
        self.release_all()
        try:
            with self.cache.groups(wanted) as groups:
                seen = [[data.tobytes() for data in group] for group in groups]
        except WeightsError as error:
            self._check(f"block{keys[0]}.shard" in str(error))
        else:
            self._check([data for group in seen for data in group] == [content(key, self.size) for key in wanted])
            self._check(len(seen) <= 1 or len(wanted) > self.slots)
        self._check(not self.cache.shelf.table.pins.any())

    @rule(keys=KEYS)
    def expect(self, keys: tuple[int, list[int]]) -> None:
        self.cache.expect([(keys[0], unit) for unit in keys[1]])

    @rule(number=st.integers(0, 1 << 20))
    def release(self, number: int) -> None:
        if self.held:
            self.held.pop(number % len(self.held))[0].__exit__(None, None, None)

    @rule()
    def release_all(self) -> None:
        while self.held:
            self.held.pop()[0].__exit__(None, None, None)

    @rule(count=st.integers(1, 4))
    def fail_reads(self, count: int) -> None:
        self.disk.faults = count

    @rule()
    def step(self) -> None:
        self.cache.begin()

    def _check(self, right: bool) -> None:
        assert right

    @invariant()
    def what_is_held_is_whole(self) -> None:
        for _, keys, data in getattr(self, "held", []):
            assert [each.tobytes() for each in data] == [content(key, self.size) for key in keys]

    @invariant()
    def no_unit_is_twice_there_and_memory_is_kept(self) -> None:
        if hasattr(self, "cache"):
            with self.cache.slots.lock:
                assert not table_faults(self.cache.shelf.table)
            assert (self.beyond[self.used :] == 77).all()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            assert set(threading.enumerate()) <= self.threads_before


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
