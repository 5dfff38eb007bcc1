"""Shared parts of the recovery benchmarks: workers struck at random moments, and the measured recoveries."""

import random
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from benchmarks.result import Check, Row
from tests.support.house import Laptop, during_step

WORKERS = 3
RECOVERY_S = 5.0  # the aim at the 95th percentile, with shards cached
NOTICED_S = {"kill": 1.0, "freeze": 3.0}  # the aims
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass
class Strike:
    """One fault: the worker that was struck, and the time (`monotonic` seconds; 0 before the fault)."""

    kind: str
    laptop: Laptop | None = None
    at: float = 0.0

    def undo(self) -> None:
        """Start the worker again, or wake it."""
        assert self.laptop
        if self.kind == "kill":
            self.laptop.start()
        else:
            self.laptop.signal(signal.SIGCONT)


@dataclass
class Recoveries:
    """Recoveries from one kind of fault: the longest pause of each answer, and the delays until notice, in seconds.

    `missed` counts the faults after an answer's last token, which have neither a pause nor a delay.
    """

    pauses: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    missed: int = 0


@contextmanager
def striking(
    kind: str, laptops: Sequence[Laptop], seed: int, tokens: int
) -> Iterator[tuple[Strike, Callable[[int], None]]]:
    """Strike one worker during an answer of `tokens` tokens; `seed` draws the worker and the moment.

    The worker stays struck. The caller must call the second yielded value with the number of tokens after each token
    (`tests.support.house.during_step`).
    """
    strike = Strike(kind)

    def do(drawn: random.Random) -> None:
        strike.laptop = drawn.choice(laptops)
        strike.at = monotonic()
        strike.laptop.signal(SIGNALS[kind])

    with during_step(seed, tokens, do) as heard:
        yield strike, heard


def late(seconds: Sequence[float]) -> float:
    """Return the 95th percentile of `seconds`."""
    return (
        statistics.quantiles(seconds, n=20, method="inclusive")[18] if len(seconds) > 1 else max(seconds, default=0.0)
    )


def rows(found: dict[str, Recoveries]) -> list[Row]:
    """Make a row for each kind of fault."""
    return [
        {
            "fault": kind,
            "in an answer": len(one.pauses),
            "after it": one.missed,
            "pause p50, s": statistics.median(one.pauses or [0.0]),
            "pause p95, s": late(one.pauses),
            "most, s": max(one.pauses, default=0.0),
            "noticed p50, s": statistics.median(one.noticed or [0.0]),
            "noticed p95, s": late(one.noticed),
        }
        for kind, one in found.items()
    ]


def checks(found: dict[str, Recoveries]) -> list[Check]:
    """Make the checks of pauses and of the delay until a fault is noticed."""
    pauses = [pause for kind in SIGNALS for pause in found[kind].pauses]
    noticed = [
        Check(f"seconds until a {kind} is noticed, p95", late(found[kind].noticed), aim, at_most=True)
        for kind, aim in NOTICED_S.items()
    ]
    return [Check("seconds of a recovery, p95", late(pauses), RECOVERY_S, at_most=True), *noticed]
