"""One budget in a process of its own: `python -m benchmarks.memory.budgeted PACK BYTES SECONDS ROUNDS`.

The process runs rounds of decoding within the budget. Before and after each round it measures the bare disk, and a
second session with all weights in memory: on a shared machine all three drift. It prints the rounds and the node's
figures as JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import mean, median
from subprocess import PIPE, run
from typing import Any

from master.generation.answer import AnswerLimits, answer
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.storage.extent import Extent
from scheduler.storage.tune import DiskSpeed, disk_for, measure_reads
from tpi.config import default_cache
from tpi.devices.pages import PAGE
from tpi.pack.reader import Pack

CONTEXT = 512
PROMPT = list(range(1, 33))
_RAW_BYTES, _RAW_S = 1 << 30, 1.0  # most bytes and seconds of one measurement of the disk
_FILL_S = 0.5  # seconds in which the ring fills up after a token, so that its loader stops
_FEWEST, _MOST = 2, 64  # tokens of a round
_LOOKS = count()


@dataclass(frozen=True)
class Round:
    """One round, and the speed that was possible at that time.

    `disk` and `resident` are means of the measurements before and after the round.
    """

    speed: float  # tokens per second
    raw: float  # bytes per second of the disk
    resident: float  # tokens per second with everything in memory
    streamed: float  # bytes read from disk per pass over the layers

    @property
    def possible(self) -> float:
        """Possible tokens per second: the lower of the limits of the disk, and of memory and cores."""
        return min(self.raw / self.streamed, self.resident) if self.streamed else self.resident

    @property
    def reached(self) -> float:
        """Speed as a share of the possible speed."""
        return self.speed / self.possible


@dataclass(frozen=True)
class Figures:
    """Measurements of one memory budget."""

    rounds: Sequence[Round]
    node: dict[str, Any]  # as in --json; its peak is that of the budget's session alone

    @property
    def speed(self) -> float:
        """Median tokens per second."""
        return self.typical("speed")

    @property
    def reached(self) -> float:
        """Median share of the possible speed that the rounds reached."""
        return self.typical("reached")

    def typical(self, name: str) -> float:
        """Return the median of one figure of the rounds."""
        return median(float(getattr(one, name)) for one in self.rounds)


def pooled(runs: Sequence[Figures]) -> Figures:
    """Pool the rounds of several processes.

    `node` is taken from the process of median speed, with the highest peak of all processes.
    """
    middle = sorted(runs, key=lambda one: one.speed)[len(runs) // 2]
    peak = max(int(one.node["peak_rss_bytes"]) for one in runs)
    return Figures([each for one in runs for each in one.rounds], middle.node | {"peak_rss_bytes": peak})


def measured(pack: Path, budget: int, seconds: float, rounds: int) -> Figures:
    """Measure one budget in a child process, in rounds of about `seconds` each. Return the figures of the budget."""
    command = [sys.executable, "-m", "benchmarks.memory.budgeted", str(pack), str(budget), str(seconds), str(rounds)]
    done = run(command, stdout=PIPE, text=True, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout.splitlines()[-1])
    return Figures([Round(**one) for one in found["rounds"]], found["node"])


def decode(session: Session, tokens: int, mark: Callable[[], None] = lambda: None) -> float:
    """Generate `tokens` tokens after the first, and return how many there were per second. Call `mark` at the first."""
    limits, greedy = AnswerLimits(tokens + 1, ignore_eos=True), Sampler(Sampling(temperature=0))
    with session.answering() as engine:
        return answer(engine, session.tokenizer, PROMPT, greedy, limits, mark=mark).decode_rate


def raw_speed(pack: Pack, disk: DiskSpeed, size: int = _RAW_BYTES, seconds: float = _RAW_S) -> float:
    """Return the bytes per second that the disk delivers when nothing else reads.

    Read at most `size` bytes, for at most `seconds` seconds. Each call begins at another file, because a file that is
    read repeatedly comes from a cache of the host.
    """
    files = sorted({block.path for block in pack.walk()})
    first = 7 * next(_LOOKS) % len(files)
    extents = [Extent(path, 0, path.stat().st_size // PAGE * PAGE) for path in files[first:] + files[:first]]
    time.sleep(_FILL_S)
    return measure_reads(extents, disk.open(max(extent.nbytes for extent in extents)), size, seconds)


class _Pair:
    """A session within the memory budget, and a session with all weights in memory."""

    def __init__(self, budgeted: Session, whole: Session, seconds: float) -> None:
        self._budgeted, self._whole = budgeted, whole
        self._disk = disk_for(sorted({block.path for block in budgeted.pack.walk()}), default_cache())
        self._tokens, self._whole_tokens = (
            min(max(round(seconds * decode(session, _FEWEST)), _FEWEST), _MOST) for session in (budgeted, whole)
        )

    def rounds(self, number: int) -> list[Round]:
        looks, speeds, streamed = [self._look()], list[float](), list[float]()
        for _ in range(number):
            before = self._budgeted.figures.stats()[0]
            speeds.append(decode(self._budgeted, self._tokens, self._budgeted.figures.mark))
            looks.append(self._look())
            after = self._budgeted.figures.stats()[0]
            streamed.append((after.streamed_bytes - before.streamed_bytes) / (after.steps - before.steps))
        around = [
            (mean(raw), mean(resident)) for raw, resident in (zip(*pair, strict=True) for pair in pairwise(looks))
        ]
        return [
            Round(speed, raw, resident, each)
            for speed, (raw, resident), each in zip(speeds, around, streamed, strict=True)
        ]

    def _look(self) -> tuple[float, float]:
        """Measure the disk while the node does not read from it, then the speed with all weights in memory."""
        return raw_speed(self._budgeted.pack, self._disk), decode(self._whole, self._whole_tokens)


def main(path: str, budget: int, seconds: float, rounds: int) -> None:
    """Measure one budget, as the child process does."""
    with Session(RunOptions(path, context=CONTEXT, memory=budget)) as session:
        decode(session, _FEWEST)
        peak = {"peak_rss_bytes": session.figures.report()[0].peak_rss_bytes}
        with Session(RunOptions(path, context=CONTEXT, scheduler=False)) as whole:
            found = _Pair(session, whole, seconds).rounds(rounds)
        figures = Figures(found, asdict(session.figures.report()[0]) | peak)
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
