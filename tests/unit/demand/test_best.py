"""The report that compares a demand cache with Belady's policy."""

from scheduler.demand.choice.replay import ReplayResult
from scheduler.demand.stats import DemandStats
from worker.demand.best import best_note, hits, megabytes

BEST = ReplayResult("Belady", hits=70, uses=100, steps=256, unit_bytes=1_000_000)


def test_the_best_of_a_part_is_given_with_the_parts_own_figure() -> None:
    part = DemandStats(steps=256, hits=50, misses=50, read_bytes=50_000_000)
    whole = DemandStats(steps=2000, hits=900, misses=100, read_bytes=100_000_000)
    assert best_note(hits, whole, part, BEST, "at best") == "(in the first 256 steps 50%, at best 70%)"
    assert best_note(megabytes, whole, part, BEST, "at best") == "(in the first 256 steps 0.20, at best 0.12)"
    assert best_note(hits, part, part, BEST, "at best") == "(at best 70%)"
