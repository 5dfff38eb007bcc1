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
    """Return a note in parentheses with the best possible value of a figure, to print after the run's own value.

    If the run has more steps than were recorded, the note also has the run's value in the recorded steps, because only
    that can be compared with the best value.

    Args:
        show: turns counts into the text of the figure: `hits` or `megabytes`.
        whole: the counts of the whole run.
        recorded: the run's counts in the recorded steps.
        best: the counts of Belady's policy in the recorded steps.
        name: the words before the best value, for example "at best".
    """
    part = f"in the first {best.steps} steps {show(recorded)}, " if recorded.steps < whole.steps else ""
    return f"({part}{name} {show(best)})"


def hits(counted: DemandStats | ReplayResult) -> str:
    """Return the share of uses that found their unit in the cache, in percent."""
    return f"{counted.hit_rate:.0%}"


def megabytes(counted: DemandStats | ReplayResult) -> str:
    """Return the megabytes read per step."""
    return f"{counted.bytes_per_step / MB:.2f}"
