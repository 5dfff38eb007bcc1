"""What a run found in a demand cache, beside what Belady's policy makes of the steps that were recorded."""

from collections.abc import Callable

from scheduler.demand.choice.replay import Replayed
from scheduler.demand.stats import DemandStats

MB = 1e6


def the_best(
    show: Callable[[DemandStats | Replayed], str], whole: DemandStats, recorded: DemandStats, best: Replayed, name: str
) -> str:
    """What belongs beside a figure of the whole run: the best of its recorded part, under that `name`.

    Where the run went on after that part, its own figure of the part stands there too: the best of the first steps
    says nothing about later ones.
    """
    part = f"in the first {best.steps} steps {show(recorded)}, " if recorded.steps < whole.steps else ""
    return f"({part}{name} {show(best)})"


def hits(counted: DemandStats | Replayed) -> str:
    """Share of the uses that found their unit."""
    return f"{counted.hit_rate:.0%}"


def megabytes(counted: DemandStats | Replayed) -> str:
    """MB that a step read."""
    return f"{counted.bytes_per_step / MB:.2f}"
