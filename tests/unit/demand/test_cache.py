"""The demand cache in 200 drawn timings, with failing reads and read-ahead, compared with a replay of its uses."""

import threading
from contextlib import closing
from random import Random
from time import sleep

import numpy as np
import pytest

from scheduler.demand.cache import DemandCache
from scheduler.demand.choice.replay import bound, replay
from scheduler.demand.loads import IdleUnlessDemanded
from scheduler.demand.policies import PolicyChoice
from scheduler.demand.sources import ALONE, DiskUnits, HostUnits
from scheduler.slots.workers import Readers
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.workers import QueueWorkers
from tests.support.devices.demanded import IMPORTANCE, Clock, ShuffledDisk, cache_of, content, files_of, right
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import PlanError, TpiError, WeightsError

SEEDS = range(200)


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 20] for at in range(0, len(SEEDS), 20)], ids=str)
def test_no_unit_is_read_half_loaded_in_any_timing(seeds: range) -> None:
    for seed in seeds:
        random = Random(seed)
        size, named = random.choice([64, 700, 5000, ALONE + 5]), list[bool]()
        with cache_of(random.randint(1, 3), random.randint(2, 7), size, seed=seed) as (cache, disk):
            for _ in range(3):
                cache.begin()
                for block in range(3):
                    disk.faults = random.choice([0, 0, 0, 2])
                    keys = [(block, unit) for unit in random.sample(range(6), random.randint(1, 6))]
                    try:
                        with cache.follow(keys) as held:
                            cache.expect([((block + 1) % 3, unit) for unit in random.sample(range(6), 2)])
                            assert all(right(data, key, size) for key, data in zip(keys, held, strict=True))
                    except WeightsError as error:
                        named.append(f"block{block}.shard" in str(error))
        assert all(named)


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 40] for at in range(0, len(SEEDS), 40)], ids=str)
def test_nothing_is_overwritten_before_a_device_has_used_it(seeds: range) -> None:
    for seed in seeds:
        random = Random(seed)
        keys = [(block, unit) for block in range(3) for unit in range(5)]
        sizes = [random.randint(1, 900) for _ in keys]
        below = [np.frombuffer(content(key, size), np.uint8) for key, size in zip(keys, sizes, strict=True)]
        wrong = random.randint(1, 60)
        with Shuffled(native, seed, wrong.__eq__) as device:
            with closing(TransferQueue()) as queue:
                source = HostUnits(device, {key: _Bytes(data) for key, data in zip(keys, below, strict=True)}, sizes)
                memory = device.memory.allocate(random.randint(2, 6) * source.slot_bytes)
                policy = IMPORTANCE.open(np.array([block for block, _ in keys]))
                with closing(
                    DemandCache(source, memory, policy, QueueWorkers(queue, "experts"), device=device)
                ) as cache:
                    _use_on(device, cache, random, dict(zip(keys, sizes, strict=True)))
            device.memory.free(memory)


class _Bytes:
    """A hold of bytes that stay in memory; it may be entered several times."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def __enter__(self) -> Bytes:
        return self._data

    def __exit__(self, *_: object) -> None:
        pass


def _use_on(device: Shuffled, cache: DemandCache, random: Random, sizes: dict[tuple[int, int], int]) -> None:
    pending, failures = [], 0
    for _ in range(3):
        cache.begin()
        for block in range(3):
            keys = [(block, unit) for unit in random.sample(range(5), random.randint(1, 5))]
            try:
                with cache.follow(keys) as held:
                    pending += [(key, device.start(data.copy)) for key, data in zip(keys, held, strict=True)]
            except OSError:
                failures += 1
    assert failures <= 1
    for key, result in pending:
        assert right(result.wait(), key, sizes[key])


def test_what_is_held_together_is_there_and_stays() -> None:
    with cache_of(slots=4) as (cache, _):
        cache.begin()
        with cache.hold([(0, 1), (0, 3)]) as first, cache.hold([(1, 0), (1, 5)]) as second:
            with pytest.raises(TpiError, match="release these first"), cache.hold([(2, 0)]):
                pass
            assert right(first[0], (0, 1))
            assert right(first[1], (0, 3))
            assert right(second[1], (1, 5))
        with cache.hold([(2, 0)]) as later:
            assert right(later[0], (2, 0))


@pytest.mark.parametrize(("true", "most"), [(1.0, 1.05), (0.5, 1.1)])
def test_an_idle_disk_reads_little_in_vain(true: float, most: float) -> None:
    """Each predicted unit is right with the probability `true`; the disk has time for all predictions."""

    def reads(hints: bool) -> int:
        random = Random(1)
        with cache_of(1, 24, blocks=2, units=32, idle=IdleUnlessDemanded()) as (cache, disk):
            for _ in range(200):
                cache.begin()
                chosen = [sorted({min(31, int(random.expovariate(0.1))) for _ in range(8)}) for _ in range(2)]
                foretold = {unit if random.random() < true else random.randrange(32) for unit in chosen[1]}
                for block, units in enumerate(chosen):
                    with cache.hold([(block, unit) for unit in units]):
                        if hints and not block:
                            cache.expect([(1, unit) for unit in sorted(foretold)])
                    while len(cache.shelf.read_ahead):  # until a reader has taken or dropped them
                        sleep(0)
                    cache.slots.drain()
            return disk.reads

    assert reads(hints=True) <= most * reads(hints=False)


def test_a_failed_load_is_raised_by_its_hold_and_tried_again() -> None:
    with cache_of() as (cache, disk):
        disk.faults = 2  # a read and its retry
        with pytest.raises(WeightsError, match=r"block1\.shard"), cache.hold([(1, 2)]):
            pass
        with cache.hold([(1, 2)]) as held:
            assert right(held[0], (1, 2))


@pytest.mark.parametrize("kind", ["lru", "lfu", "aged", "importance"])
def test_the_cache_does_what_the_replay_of_its_recording_says(kind: str) -> None:
    random = Random(5)
    with cache_of(slots=7, choice=PolicyChoice(kind)) as (cache, _):  # type: ignore[arg-type]
        for _ in range(30):
            cache.begin()
            for block in range(3):
                keys = [(block, unit) for unit in random.sample(range(6), 2)]
                with cache.hold(keys) as held:
                    assert all(right(data, key) for key, data in zip(keys, held, strict=True))
        recording, stats = cache.recording()
        policy = PolicyChoice(kind).open(recording.blocks)  # type: ignore[arg-type]
        assert replay(recording, policy, 7).hits == stats.hits <= bound(recording, 7).hits
        assert stats.uses == 180
        assert stats.steps == 30


def test_small_neighbours_are_one_read_and_large_units_one_each() -> None:
    for size, reads in ((700, 1), (ALONE, 3)):
        with cache_of(slots=6, size=size) as (cache, disk):
            with cache.hold([(0, 1), (0, 2), (0, 3)]) as held:
                assert all(right(data, (0, at), size) for at, data in enumerate(held, 1))
            assert disk.reads == reads


def spend(cache: DemandCache, clock: Clock, gap: float) -> None:
    """Hold blocks with gaps of a number of seconds, until the gaps are measured."""
    for at in range(6):
        with cache.hold([(0, at % 2)]):
            pass
        clock.now += gap


def test_read_ahead_needs_idle_time_that_was_measured() -> None:
    for gap, ahead in ((0.0, 0), (1e9, 1)):
        clock = Clock()
        with cache_of(slots=5, clock=clock) as (cache, disk):
            spend(cache, clock, gap)
            with cache.hold([(0, 0)]):
                pass
            before = disk.reads
            cache.expect([(1, 4)])
            if ahead:
                _until(lambda disk=disk, before=before: disk.reads > before)
            with cache.hold([(1, 4)]) as held:
                assert right(held[0], (1, 4))
            stats = cache.stats()
            assert (stats.ahead, stats.ahead_used, disk.reads - before) == (ahead, ahead, 1)


def _until(happened: object) -> None:
    deadline = threading.Event()
    for _ in range(5000):
        if happened():  # type: ignore[operator]
            return
        deadline.wait(0.002)
    pytest.fail("it did not happen in ten seconds")


def test_what_was_read_ahead_in_vain_is_counted() -> None:
    clock = Clock()
    with cache_of(slots=2, clock=clock) as (cache, disk):
        spend(cache, clock, 1e9)
        with cache.hold([(0, 0)]):
            pass
        before = disk.reads
        cache.expect([(1, 4)])
        _until(lambda: disk.reads > before)
        with cache.hold([(1, 0), (1, 1)]):
            pass
        assert cache.stats().ahead_wasted == 1


def test_memory_that_holds_no_unit_is_refused() -> None:
    files, extents = files_of(1, 1, 700)
    source = DiskUnits(ShuffledDisk(files, 1), extents)
    with pytest.raises(PlanError, match="a unit does not fit into"):
        DemandCache(source, page_buffer(0), PolicyChoice("lru").open(np.zeros(1, np.int64)), Readers(1))


def test_a_closed_cache_says_so() -> None:
    with cache_of() as (cache, _):
        cache.close()
        with pytest.raises(TpiError, match="is closed"), cache.hold([(0, 0)]):
            pass
