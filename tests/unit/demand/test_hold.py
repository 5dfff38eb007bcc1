"""Blocks that are held on demand by the weights of a node."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from scheduler.demand.hold import DemandedBlock
from scheduler.weights import Arrangement, Weights
from scheduler.window.window import Resident
from tests.support.devices.demanded import cache_of, right
from tpi.devices.pages import Bytes
from tpi.errors import WeightsError

SHARED = np.full(9, 5, np.uint8)


def gathered(units: Sequence[tuple[int, Bytes]]) -> str:
    """Return the units that are computed in one call."""
    assert all(right(data, (1, unit)) for unit, data in units)
    return " ".join(f"unit {unit}" for unit, _ in units)


def weights_over(cache: object) -> Weights[str]:
    """Return weights: block 0 is dense, block 1 has a shared segment and units 0, 1, 2 and 4 of the cache's block 1."""
    always = [("shared", nullcontext(SHARED))]
    demanded = DemandedBlock(1, always, (0, 1, 2, 4), cache, gathered)  # type: ignore[arg-type]
    return Weights(Resident([]), Arrangement([[("dense", nullcontext(SHARED))], always], [SHARED], {1: demanded}))


def seen(weights: Weights[str], block: int, wanted: list[int] | None) -> list[tuple[str, bytes]]:
    hold = weights.hold(block, wanted)
    with hold as segments:
        found = [(segment, data.tobytes()) for segment, data in segments]
    assert len(found) == len(hold)
    return found


@pytest.mark.parametrize(("slots", "all_of_them"), [(2, 4), (3, 4), (4, 1), (6, 1)])
def test_wanted_units_follow_the_resident_ones_at_once(slots: int, all_of_them: int) -> None:
    with cache_of(slots=slots) as (cache, _):
        weights = weights_over(cache)
        assert weights.now.kept is None
        for wanted, expected in (([4, 3, 1], ["unit 4 unit 1"]), ([], []), ([5], [])):
            assert [name for name, _ in seen(weights, 1, wanted)] == ["shared", *expected]
        found = [name for name, _ in seen(weights, 1, None)]
        assert " ".join(found) == "shared unit 0 unit 1 unit 2 unit 4"
        assert len(found) == 1 + all_of_them
        assert [name for name, _ in seen(weights, 0, None)] == ["dense"]


def test_a_visit_that_breaks_off_gives_everything_back() -> None:
    with cache_of(slots=2) as (cache, disk):
        weights = weights_over(cache)
        with weights.hold(1, [0, 1]) as segments:
            next(segments)
        seen(weights, 1, [0, 1])  # nothing is being read any more
        disk.faults = 4  # both units are read at the same time, and each again after a fault
        with pytest.raises(WeightsError, match=r"block1\.shard"):
            seen(weights, 1, [2, 4])
        disk.faults = 0
        assert not cache.shelf.table.pins.any()
        assert [name for name, _ in seen(weights, 1, [2, 4])] == ["shared", "unit 2 unit 4"]


def test_hints_reach_the_cache() -> None:
    with cache_of() as (cache, _):
        weights = weights_over(cache)
        weights.expect(0, [1])
        weights.expect(1, [1, 5])
        assert cache.shelf._wanted_soon.sum() == 1


class Broken:
    """A listener that fails when a step begins."""

    aborted = 0

    def begin(self, short: bool) -> None:
        raise WeightsError("an earlier copy failed")

    def abandon(self) -> None:
        self.aborted += 1


def test_a_step_that_cannot_begin_is_aborted() -> None:
    steps = Broken()
    weights = Weights(Resident([]), Arrangement[str]([], [], {}), steps=steps)
    with pytest.raises(WeightsError, match="an earlier copy failed"):
        weights.begin(1)
    assert steps.aborted == 1
