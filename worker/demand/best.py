"""Figures of a demand cache for the user, next to the figures of Belady's policy for the recorded steps."""

from collections.abc import Callable

from scheduler.demand.choice.replay import ReplayResult
from scheduler.demand.stats import DemandStats

MB = 1e6


def best_note(
    show: Callable[[DemandStats | ReplayResult], str],
    whole: DemandStats,
    recorded: DemandStats,
    best: ReplayResult,
    name: str,
) -> str:
    """Return the note in parentheses that compares a figure of the run with the best possible one.

    `name` introduces the best figure. If the run has more steps than were recorded, the note also has the run's own
    figure for the recorded steps, because only that can be compared with the best figure.
    """
    part = f"in the first {best.steps} steps {show(recorded)}, " if recorded.steps < whole.steps else ""
    return f"({part}{name} {show(best)})"


def hits(counted: DemandStats | ReplayResult) -> str:
    """Return the share of uses that found their unit in the cache, in percent."""
    return f"{counted.hit_rate:.0%}"


def megabytes(counted: DemandStats | ReplayResult) -> str:
    """Return the MB read per step."""
    return f"{counted.bytes_per_step / MB:.2f}"
