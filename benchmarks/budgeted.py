"""One budget in a process of its own: `python -m benchmarks.budgeted PACK BYTES TOKENS ROUNDS` (0 bytes: no scheduler).

Rounds of decoding, with a look at the bare disk before and after each: its speed drifts on a shared machine. Prints the
speeds and the node's figures as JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import PIPE, run
from typing import Any

from master.answer import Limits, answer
from master.options import Placement
from master.sampler import Sampler, Sampling
from master.session import Session
from scheduler.extent import Extent
from scheduler.memory import PAGE
from scheduler.tune import DiskSpeed, disk_for, measure
from tpi.config import default_cache
from tpi.pack.reader import Pack

CONTEXT = 512
PROMPT = list(range(1, 33))
_RAW_BYTES, _RAW_S = 1 << 30, 1.0  # of one look at the disk, at most
_FILL_S = 0.5  # in which the ring fills up after a token, and its loader falls silent


@dataclass(frozen=True)
class Figures:
    """What was measured of one budget, one item per round: tokens per second, and bytes per second of the disk."""

    speeds: Sequence[float]
    raw: Sequence[float]
    node: dict[str, Any]  # as in --json

    @property
    def speed(self) -> float:
        """Median tokens per second."""
        return median(self.speeds)

    def reached(self, resident: float) -> float:
        """Speed over the lesser of what the disk and (`resident`, tokens per second) memory allow: the median round."""
        streamed = float(self.node["streamed_bytes_per_token"])
        possible = [min(raw / streamed if streamed else resident, resident) for raw in self.raw]
        return median(speed / most for speed, most in zip(self.speeds, possible, strict=True))


def pooled(runs: Sequence[Figures]) -> Figures:
    """All rounds of several processes; `node` is that of the one of median speed, with the highest peak of all."""
    middle = sorted(runs, key=lambda one: one.speed)[len(runs) // 2]
    peak = max(int(one.node["peak_rss_bytes"]) for one in runs)
    speeds = [speed for one in runs for speed in one.speeds]
    raw = [look for one in runs for look in one.raw]
    return Figures(speeds, raw, middle.node | {"peak_rss_bytes": peak})


def measured(pack: Path, budget: int, tokens: int, rounds: int) -> Figures:
    """Run the child."""
    command = [sys.executable, "-m", "benchmarks.budgeted", str(pack), str(budget), str(tokens), str(rounds)]
    done = run(command, stdout=PIPE, text=True, check=True, cwd=Path(__file__).parent.parent)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def decode(session: Session, tokens: int, mark: Callable[[], None] = lambda: None) -> float:
    """Tokens per second after the first; `mark` is called at the first."""
    sequence = session.engine.admit(PROMPT)
    limits = Limits(tokens + 1, ignore_eos=True)
    greedy = Sampler(Sampling(temperature=0))
    result = answer(session.engine, session.tokenizer, sequence, greedy, limits, mark=mark)
    session.engine.release(sequence)
    return result.decode_rate


def raw_speed(pack: Pack, disk: DiskSpeed, size: int = _RAW_BYTES, seconds: float = _RAW_S) -> float:
    """Bytes per second that the disk delivers when nothing else reads: of at most so many bytes, in so many seconds."""
    files = {block.path for block in pack.walk()}
    extents = [Extent(path, 0, path.stat().st_size // PAGE * PAGE) for path in sorted(files)]
    time.sleep(_FILL_S)
    return measure(extents, disk.open(max(extent.nbytes for extent in extents)), size, seconds)


def main(path: str, budget: int, tokens: int, rounds: int) -> None:
    """The child."""
    placement = Placement(path, context=CONTEXT, memory=budget or None, scheduler=bool(budget))
    with Session(placement) as session:
        disk = disk_for(sorted({block.path for block in session.pack.walk()}), default_cache())
        decode(session, 2)
        speeds, looks = [], [raw_speed(session.pack, disk)]
        for _ in range(rounds):
            speeds.append(decode(session, tokens, session.mark))
            looks.append(raw_speed(session.pack, disk))
        raw = [(before + after) / 2 for before, after in pairwise(looks)]
        print(json.dumps(asdict(Figures(speeds, raw, asdict(session.report()[0])))))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
