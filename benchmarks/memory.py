"""A model larger than memory, over budgets from 12% to 100% of it: peak memory, speed, how much of the disk is used.

Each budget is a process of its own (`tpi bench`), so that VmHWM says what it took. The raw speed of the disk is
measured right before and after it, past the page cache, with the chunk and the reads in flight that were best.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import MIB
from benchmarks.models import llama_1b_f32, smollm2
from benchmarks.result import Bars, Check, Result, Row, Table
from master.answer import Limits, answer
from master.options import Placement
from master.sampler import Sampler, Sampling
from master.session import Session
from scheduler.extent import Extent
from scheduler.memory import PAGE
from scheduler.tune import DiskSpeed, disk_for, measure
from tpi.config import default_cache
from tpi.pack.locate import open_model
from tpi.pack.reader import Pack

TPI = (sys.executable, "-m", "tpi.cli")
SHARES = (0.12, 0.15, 0.20, 0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 1.00)
CONTEXT = 512
MASTER_BARE = 120.0  # MiB
PAIRS = 20
RAW_BYTES = 1 << 30
NOTES = """
1.1B Llama shape, f32 pack ({size:.0f} MiB), context {context}. A share is the budget (`--memory`) in parts of the
model's bytes. `bare` is the process before it is given weights, `peak` its VmHWM less that. `raw` is the disk alone,
read past the page cache in the same minute; `possible` is the lesser of raw speed over streamed bytes per token and
the speed with everything in memory, `reached` the decode speed over it. A budget of 100% is compared with
`--no-scheduler` in {pairs} pairs, one after the other in one process, the order changing.
"""


@dataclass(frozen=True)
class Trial:
    """One budget."""

    share: float
    budget: int  # bytes
    fields: dict[str, Any]  # of `tpi bench --json`
    raw: float  # bytes per second of the disk alone

    @property
    def node(self) -> dict[str, Any]:
        """The master's figures."""
        node: dict[str, Any] = self.fields["nodes"][0]
        return node

    @property
    def above(self) -> int:
        """Bytes that the process took above its bare self."""
        return int(self.node["peak_rss_bytes"]) - int(self.node["bare_rss_bytes"])

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return float(self.fields["decode_tokens_per_s"])

    def reached(self, resident: float) -> float:
        """Speed as a part of what disk and memory allow; `resident` in tokens per second."""
        streamed = float(self.node["streamed_bytes_per_token"])
        return self.speed / min(self.raw / streamed if streamed else resident, resident)


def bench(quick: bool) -> Result:
    """The sweep, and the pairs."""
    model = smollm2() if quick else llama_1b_f32()
    pack = open_model(str(model.path), "f32", default_cache())
    size, shares = pack.weight_bytes, SHARES[::5] if quick else SHARES
    tokens = 4 if quick else 8
    resident = run(pack, None, tokens)["decode_tokens_per_s"]
    trials = [trial(pack, share, int(share * size), tokens) for share in shares]
    ratios = [on / off for on, off in pairs(pack, 3 if quick else PAIRS, tokens)]
    floor = max(trial_.node["bare_rss_bytes"] for trial_ in trials) / MIB
    steps = [after.speed / before.speed for before, after in pairwise(trials)]
    checks = [
        Check(
            "most memory above the bare process, times the budget", max(t.above / t.budget for t in trials), 1.0, True
        ),
        Check("bare master, MiB", floor, MASTER_BARE, at_most=True),
        Check("least speed, times that of the next smaller budget", min(steps, default=1.0), 1.0),
        Check("least speed, times the possible", min(t.reached(resident) for t in trials), 0.90),
        Check(f"speed at 100%, times --no-scheduler, median of {len(ratios)} pairs", median(ratios), 0.97),
    ]
    table = Table("Budgets", [_row(one, resident) for one in trials])
    notes = NOTES.format(size=size / MIB, context=CONTEXT, pairs=len(ratios))
    return Result("Memory budgets", notes, [table], checks, [_plot(trials, resident)])


def trial(pack: Pack, share: float, budget: int, tokens: int) -> Trial:
    """Run one budget between two looks at the disk."""
    disk = disk_for(_files(pack), default_cache())
    before = raw_speed(pack, disk)
    fields = run(pack, budget, tokens)
    return Trial(share, budget, fields, (before + raw_speed(pack, disk)) / 2)


def run(pack: Pack, budget: int | None, tokens: int) -> dict[str, Any]:
    """A process of its own for one budget; None: the scheduler is off."""
    limit = ["--no-scheduler"] if budget is None else ["--memory", str(budget)]
    return bench_process(str(pack.path), *limit, prompt=32, generate=tokens, repeat=2)


def bench_process(model: str, *flags: str, prompt: int, generate: int, repeat: int) -> dict[str, Any]:
    """`tpi bench --json` with these numbers of tokens."""
    lengths = ["--prompt-tokens", str(prompt), "--gen-tokens", str(generate), "--repeat", str(repeat)]
    command = [*TPI, "bench", "-m", model, "-c", str(CONTEXT), *lengths, *flags, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


def raw_speed(pack: Pack, disk: DiskSpeed) -> float:
    """Bytes per second that the disk delivers now, when nothing else happens."""
    extents = [Extent(path, 0, path.stat().st_size // PAGE * PAGE) for path in _files(pack)]
    return measure(extents, disk.open(), RAW_BYTES, seconds=2.0)


def pairs(pack: Pack, count: int, tokens: int) -> Iterator[tuple[float, float]]:
    """Tokens per second with everything in memory: the scheduler on, and off."""
    everything = 2 * pack.weight_bytes
    on = Placement(str(pack.path), context=CONTEXT, memory=everything)
    off = Placement(str(pack.path), context=CONTEXT, scheduler=False)
    with Session(on) as first, Session(off) as second:
        for session in (first, second):
            decode(session, 2)
        for number in range(count):
            order = [first, second] if number % 2 else [second, first]
            speeds = {id(session): decode(session, tokens) for session in order}
            yield speeds[id(first)], speeds[id(second)]


def decode(session: Session, tokens: int) -> float:
    """Tokens per second after the first."""
    sequence = session.engine.admit(list(range(1, 9)))
    limits = Limits(tokens + 1, ignore_eos=True)
    result = answer(session.engine, session.tokenizer, sequence, Sampler(Sampling(temperature=0)), limits)
    session.engine.release(sequence)
    return result.decode_rate


def _files(pack: Pack) -> Sequence[Path]:
    """The files of the layers, each once."""
    return sorted({block.path for block in pack.walk()})


def _row(one: Trial, resident: float) -> Row:
    node = one.node
    return {
        "share": f"{one.share:.0%}",
        "budget MiB": round(one.budget / MIB),
        "bare MiB": round(node["bare_rss_bytes"] / MIB),
        "peak MiB": round(one.above / MIB),
        "planned MiB": round(node["planned_bytes"] / MIB),
        "tok/s": one.speed,
        "streamed MiB/token": round(node["streamed_bytes_per_token"] / MIB),
        "disk MB/s": round(node["disk_mb_per_s"]),
        "raw MB/s": round(one.raw / 1e6),
        "stall ms/token": float(node["io_stall_ms_per_token"]),
        "reached": one.reached(resident),
    }


def _plot(trials: Sequence[Trial], resident: float) -> Bars:
    groups = [f"{one.share:.0%}" for one in trials]
    possible = [one.speed / one.reached(resident) for one in trials]
    return Bars("Speed by memory budget", "tok/s", groups, {"TPI": [t.speed for t in trials], "possible": possible})
