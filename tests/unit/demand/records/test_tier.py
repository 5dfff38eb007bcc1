"""Neurons that are read while others are computed, in 200 drawn timings of reads; failures; counts."""

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.devices.recorded import tier_of, whole
from tpi.errors import PlanError, TpiError, WeightsError

SEEDS = range(200)
I32 = npt.NDArray[np.int32]


def drawn(random: np.random.Generator, most: int, neurons: int = 48) -> I32:
    count = int(random.integers(0, most + 1))
    return np.sort(random.permutation(neurons)[:count]).astype(np.int32)


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 40] for at in range(0, len(SEEDS), 40)], ids=str)
def test_what_is_held_is_whole_in_every_timing(seeds: range) -> None:
    """Each layer is predicted by the layer before, rightly or wrongly, or not at all; some reads fail."""
    asked = found = along = failed = 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        with tier_of(seed, slots=int(random.integers(8, 40)), threads=int(random.integers(1, 4))) as (tier, disk, _):
            for step in range(4):
                wanted = [drawn(random, 8) for _ in tier.layers]
                for layer, neurons in enumerate(wanted):
                    later = layer + 1
                    if later < len(wanted) and random.random() < 0.8:
                        tier.expect(later, wanted[later] if random.random() < 0.8 else drawn(random, 8))
                    disk.faults = 2 if seed % 4 == 0 and step == 2 else 0
                    try:
                        with tier.hold(layer, neurons) as slots:
                            assert len(set(slots.tolist())) == len(neurons)  # none twice, and none missed
                            assert whole(tier, layer, neurons, slots)
                    except WeightsError as error:
                        failed += f"layer{layer}.shard" in str(error)
                tier.abandon()
                assert not any(each.table.pins.any() for each in tier.layers)
            stats = tier.stats()
            asked, found, along = asked + stats.requested, found + stats.found, along + stats.extra
    assert asked > 1500
    assert 0.1 * asked < found < asked
    assert along > 100
    assert failed > 0


def test_it_is_filled_with_what_is_active_most_often() -> None:
    with tier_of(1) as (tier, _, _):
        tier.fill()
        for layer, each in enumerate(tier.layers):
            hot = np.sort(np.argsort(-each.layer.frequency)[:16]).astype(np.int32)
            with tier.hold(layer, hot) as slots:
                assert whole(tier, layer, hot, slots)
        stats = tier.stats()
        assert (stats.requested, stats.found, stats.reads) == (48, 48, 0)


def test_repeated_units_stay_and_others_are_evicted() -> None:
    with tier_of(2, slots=8) as (tier, _, _):
        tier.fill()
        rare = np.argsort(tier.layers[0].layer.frequency)[:8].astype(np.int32)
        rare.sort()
        for _ in range(3):
            with tier.hold(0, rare):
                pass
        before = tier.stats()
        with tier.hold(0, rare) as slots:
            assert whole(tier, 0, rare, slots)
        assert tier.stats().reads == before.reads


def test_neighbours_are_one_read_and_useful_gaps_are_kept() -> None:
    with tier_of(3, slots=16, size=200, gap=400) as (tier, _, _):
        wanted = np.array([0, 1, 3, 6, 20], np.int32)  # gaps of 1, 2 and 13 records
        with tier.hold(0, wanted):
            pass
        stats = tier.stats()
        assert (stats.reads, stats.extra) == (2, 3)  # slots are empty, so whatever passes by is worth more
        with tier.hold(0, np.array([2, 4, 5], np.int32)) as slots:
            assert whole(tier, 0, np.array([2, 4, 5], np.int32), slots)
        assert tier.stats().reads == 2


@pytest.mark.parametrize("foretold", [False, True])
def test_a_read_that_fails_names_the_file_and_frees_everything(foretold: bool) -> None:
    with tier_of(4) as (tier, disk, _):
        wanted = np.array([5, 7, 40], np.int32)
        disk.faults = 100
        if foretold:
            tier.expect(1, wanted)
        with pytest.raises(WeightsError, match=r"layer1\.shard could not be read"), tier.hold(1, wanted):
            pass
        disk.faults = 0
        table = tier.layers[1].table
        assert not table.pins.any()
        with tier.hold(1, wanted) as slots:  # the next one tries again
            assert whole(tier, 1, wanted, slots)


def test_a_file_that_is_too_short_is_named() -> None:
    with tier_of(5) as (tier, disk, _):
        path = tier.layers[2].layer.extent.path
        disk.files[path] = disk.files[path][:-50]
        with (
            pytest.raises(WeightsError, match=r"layer2\.shard is shorter than"),
            tier.hold(2, np.array([47], np.int32)),
        ):
            pass


def test_more_than_there_are_slots_is_refused_and_not_foretold() -> None:
    with tier_of(6, slots=8) as (tier, disk, _):
        many = np.arange(9, dtype=np.int32)
        tier.expect(0, many)
        assert disk.reads == 0
        with pytest.raises(PlanError, match="room for 8"), tier.hold(0, many):
            pass
        assert not tier.layers[0].table.pins.any()


def test_held_and_expected_units_are_never_evicted() -> None:
    with tier_of(7, slots=8) as (tier, _, _), ExitStack() as stack:
        held = np.arange(4, dtype=np.int32)
        slots = stack.enter_context(tier.hold(0, held))
        for begin in range(4, 44, 4):
            other = np.arange(begin, begin + 4, dtype=np.int32)
            tier.expect(0, other)
            with tier.hold(0, other) as others:
                assert whole(tier, 0, other, others)
            assert whole(tier, 0, held, slots)


def test_expecting_anew_gives_back_earlier_expectations() -> None:
    with tier_of(9, slots=24) as (tier, _, _):
        for begin in range(0, 40, 8):
            tier.expect(1, np.arange(begin, begin + 8, dtype=np.int32))
        tier.abandon()
        assert not tier.layers[1].table.pins.any()
        with tier.hold(1, wanted := np.arange(20, 28, dtype=np.int32)) as slots:
            assert whole(tier, 1, wanted, slots)


def test_nothing_is_held_after_the_end() -> None:
    with tier_of(8) as (tier, _, _):
        tier.close()
        with pytest.raises(TpiError, match="closed"), tier.hold(0, np.arange(2, dtype=np.int32)):
            pass
        tier.expect(0, np.arange(2, dtype=np.int32))
