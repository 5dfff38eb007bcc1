"""Units divided between an accelerator and the CPU, in 200 drawn timings: each goes to one side, fully loaded."""

import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from random import Random

import numpy as np
import pytest

from scheduler.demand.cache import DemandCache
from scheduler.demand.loads import IdleUnlessDemanded
from scheduler.demand.policies import Key, PolicyChoice
from scheduler.demand.shared import SharedHold
from scheduler.demand.sources import DiskUnits
from scheduler.slots.workers import Readers
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.workers import QueueWorkers
from tests.support.devices.apart import SeparateCalls
from tests.support.devices.demanded import ShuffledDisk, content, files_of, right
from tests.support.kernels.kernel_cases import native
from tests.support.slots import table_faults
from tpi.devices.base import Pending
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import DeviceError, TpiError
from worker.demand.arena import LinkedExperts

SEEDS = range(200)
BLOCKS, UNITS = 3, 5
KEYS = [(block, unit) for block in range(BLOCKS) for unit in range(UNITS)]


class Shared:
    """A cache on a device with drawn timings, and the outcomes of the steps that used it."""

    def __init__(self, device: SeparateCalls, queue: TransferQueue, random: Random) -> None:
        self.sizes = {key: random.randint(1, 900) for key in KEYS}
        below = {key: np.frombuffer(content(key, size), np.uint8) for key, size in self.sizes.items()}
        self.source = LinkedExperts(device, below)
        self.capacity = random.randint(1, 2 * UNITS)
        self.memory = device.memory.allocate(self.capacity * self.source.slot_bytes)
        policy = PolicyChoice(random.choice(["importance", "lfu", "aged"])).open(np.array([key[0] for key in KEYS]))
        self.cache = DemandCache(
            self.source, self.memory, policy, QueueWorkers(queue, "experts"), device=device, idle=IdleUnlessDemanded()
        )
        self._device, self._random = device, random
        self.named: list[bool] = []
        self.pending: list[tuple[list[Key], Pending[list[Bytes]]]] = []

    def close(self) -> None:
        self.cache.close()
        self._device.memory.free(self.memory)

    def steps(self) -> None:
        """Run three steps; errors of failed copies do not end them."""
        for _ in range(3):
            with suppress(DeviceError):
                self.step()

    def step(self) -> None:
        """Visit every block: use some units, fetch some of the missing ones, predict others."""
        self.cache.begin()
        for block in range(BLOCKS):
            keys = [(block, unit) for unit in self._random.sample(range(UNITS), self._random.randint(1, UNITS))]
            if self._random.random() < 0.2:
                held = self.cache.present(keys)
                assert not held.loading
            else:
                held = self.cache.share(keys, self._chosen)
            assert sorted([*held.ready, *held.loading, *held.left_out]) == sorted(keys)
            assert len(held.ready) + len(held.loading) <= self.capacity
            self._use(held)
            hints = self._random.sample(range(UNITS), 2)
            self.cache.expect([((block + 1) % BLOCKS, unit) for unit in hints])
            if self._random.random() < 0.5:
                self._await()

    def _await(self) -> None:
        try:
            self.pending[-1][1].wait()
        except DeviceError as error:
            self.named.append(_named(error))
            raise

    def _chosen(self, ready: Sequence[Key], late: Sequence[Key]) -> int:
        assert not set(ready) & set(late)
        return self._random.randint(0, len(late))

    def _use(self, held: SharedHold) -> None:
        keys = [*held.ready, *held.loading]
        self.pending.append((keys, self._device.start(lambda: [held.data(key).copy() for key in keys])))
        held.close()
        held.close()


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 40] for at in range(0, len(SEEDS), 40)], ids=str)
def test_nothing_is_computed_on_a_slot_that_is_half_loaded(seeds: range) -> None:
    for seed in seeds:
        with SeparateCalls(native, seed) as device:
            with closing(TransferQueue()) as queue, closing(Shared(device, queue, Random(seed))) as shared:
                shared.steps()
                assert all(_outcome(keys, found, shared.sizes) for keys, found in shared.pending)
                assert not shared.named
                stats = shared.cache.stats()
                assert stats.uses == stats.hits + stats.misses + stats.elsewhere
                assert not table_faults(shared.cache.shelf.table)
            assert device.memory.used == 0


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 40] for at in range(0, len(SEEDS), 40)], ids=str)
def test_a_copy_that_fails_is_named_and_everything_is_given_back(seeds: range) -> None:
    """Let a copy fail in each of many timings, in some of which no hold waits for it."""
    before = set(threading.enumerate())
    for seed in seeds:
        random = Random(seed)
        wrong = random.randint(1, 12)
        with SeparateCalls(native, seed, wrong.__eq__) as device:
            with closing(TransferQueue()) as queue, closing(Shared(device, queue, random)) as shared:
                shared.steps()
                assert all(_outcome(keys, found, shared.sizes) for keys, found in shared.pending)
                assert all(shared.named)
                device.start(lambda: None).wait()
                assert not shared.cache.shelf.table.pins.any()
                shared.cache.close()
                assert (shared.cache.slots._failure is not None) == (device.copies >= wrong)
            assert device.memory.used == 0
    assert set(threading.enumerate()) <= before


def _outcome(keys: list[Key], found: Pending[list[Bytes]], sizes: dict[Key, int]) -> bool:
    """Return True if the bytes are correct, or if the error names the copy that failed."""
    try:
        return all(right(data, key, sizes[key]) for key, data in zip(keys, found.wait(), strict=True))
    except DeviceError as error:
        return _named(error)


def _named(error: DeviceError) -> bool:
    return "cannot be copied to apart: copy" in str(error)


def disk_cache(slots: int, kind: str = "importance") -> DemandCache:
    """Return a cache whose loads are made by one thread, at once."""
    files, extents = files_of(BLOCKS, UNITS, 700)
    source = DiskUnits(ShuffledDisk(files, 1), extents)
    memory = page_buffer(slots * source.slot_bytes)[: slots * source.slot_bytes]
    policy = PolicyChoice(kind).open(np.array([block for block, _ in source.keys]))  # type: ignore[arg-type]
    return DemandCache(source, memory, policy, Readers(1), idle=IdleUnlessDemanded())


def test_resident_units_are_ready_and_the_asked_number_is_loaded() -> None:
    with closing(disk_cache(4)) as cache:
        cache.warm([(0, 1), (0, 2), (1, 0)])
        assert (cache.stats().uses, cache.loaded_bytes > 0) == (0, True)
        cache.begin()
        asked: list[tuple[list[Key], list[Key]]] = []

        def one(ready: Sequence[Key], late: Sequence[Key]) -> int:
            asked.append((list(ready), list(late)))
            return 1

        held = cache.share([(0, unit) for unit in range(4)], one)
        assert asked == [([(0, 1), (0, 2)], [(0, 0), (0, 3)])]
        assert (held.ready, held.loading, held.left_out) == ([(0, 1), (0, 2)], [(0, 0)], [(0, 3)])
        assert all(right(held.data(key), key) for key in [*held.ready, *held.loading])
        held.close()
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.elsewhere) == (2, 1, 1)


def test_no_more_is_fetched_than_fits_beside_held_units() -> None:
    with closing(disk_cache(2)) as cache:
        cache.begin()
        first = cache.share([(0, 0)], lambda _, late: len(late))
        second = cache.share([(1, 0), (1, 1), (1, 2)], lambda _, late: len(late))
        assert [len(each.loading) for each in (first, second)] == [1, 1]
        assert len(second.left_out) == 2
        for held in (first, second):
            held.close()
        assert not cache.shelf.table.pins.any()


def test_units_computed_on_the_host_come_if_the_policy_agrees() -> None:
    with closing(disk_cache(2)) as cache:
        cache.warm([(0, 0), (0, 1)])
        for _ in range(3):
            cache.begin()
            cache.share([(0, 2), (0, 3)], lambda _, __: 0).close()
            _until_loaded(cache)
        cache.begin()
        held = cache.share([(0, 2), (0, 3)], lambda _, __: 0)
        assert held.ready == [(0, 2), (0, 3)]
        held.close()
        assert cache.stats().ahead_used == 2


def test_a_policy_that_counts_keeps_what_was_used_more_often() -> None:
    with closing(disk_cache(1, "lfu")) as cache:
        for _ in range(4):
            cache.begin()
            cache.share([(0, 0)], lambda _, late: len(late)).close()
        cache.begin()
        cache.share([(0, 1)], lambda _, __: 0).close()
        _until_loaded(cache)
        assert cache.present([(0, 0)]).ready == [(0, 0)]
        assert cache.stats().ahead == 0


def _until_loaded(cache: DemandCache) -> None:
    """Wait until no load is waiting or running."""
    over = threading.Event()
    for _ in range(5000):
        with cache.slots.lock:
            if not cache.slots.queued and not len(cache.shelf.read_ahead):
                return
        over.wait(0.002)
    pytest.fail("it was not loaded in ten seconds")


def test_a_closed_cache_shares_nothing() -> None:
    cache = disk_cache(2)
    cache.close()
    with pytest.raises(TpiError, match="is closed"):
        cache.share([(0, 0)], lambda _, __: 0)
