"""A model larger than memory, with budgets from 12% to 100% of it: peak memory, speed, and use of the disk."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from benchmarks.memory.budgeted import CONTEXT, Figures, decode, measured, pooled, raw_speed
from benchmarks.result import Bars, Check, Result, Row, Table
from benchmarks.support.machine import MIB
from benchmarks.support.models import llama_1b_f32, smollm2
from master.options import RunOptions
from master.session import Session
from scheduler.storage.tune import disk_for
from tpi.config import default_cache
from tpi.pack.library.locate import open_model
from tpi.pack.reader import Pack

SHARES = (0.12, 0.15, 0.20, 0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 1.00)
MASTER_BARE = 120.0  # MiB
REACHED, PARITY = 0.90, 0.97
PAIRS, LOADS = 20, 10
TURNS, ROUNDS, ROUND_S = 2, 4, 4.0  # of each budget: processes, rounds in one, seconds of a round
PAIR_TOKENS, PARITY_TOKENS = 2, 8
NEAR, CLOSE_PAIRS = 0.10, 12  # a budget that is not faster by as much is compared in so many pairs
_ASIDE_S, _ASIDE_TOKENS = 3.0, 4  # of one look at reading beside computing; tokens of one at computing
NOTES = """
{name} ({size:.0f} MiB), context {context}. A share is the budget (`--memory`) as a share of the model's bytes. Each
budget gets {turns} turns, each in a new process, because the memory that a process happens to get changes its speed by
several percent. A turn is {rounds} rounds of about {seconds:.0f} s of decoding. Before and after each round the same
process reads the disk alone, past the page cache (`raw`), and decodes with a second session that has all weights in
memory (`resident`). This is needed because the speed of a shared machine drifts within minutes by more than the
promised bounds. `possible` is the smaller of two speeds of the same round: the raw speed divided by the streamed bytes
per token, and the resident speed. `reached` is the measured speed divided by it. All are medians of the rounds of all
turns. `bare` is the memory of the process before it gets weights. `peak` is its VmHWM minus `bare`, before the second
session is opened, the highest of all turns.

A budget that holds all weights is compared with `--no-scheduler` in {pairs} pairs, one after the other in one process,
in changing order. It starts no readers and takes the same path as `--no-scheduler`. So the pairs show the cost of the
choice, not of the loader. Both are loaded {loads} times, in changing order. If the tokens/s of a budget are not clearly
({near:.0%}) above those of the next smaller budget, the two are compared in {close} pairs.

Reading and computing share the memory bus. The second table shows the speed of each alone, and while the other runs.
`possible` ignores both slowdowns, so no schedule reaches all of it if both take about as long.
"""


@dataclass(frozen=True)
class Trial:
    """One budget and its measurements."""

    share: float
    budget: int  # bytes
    figures: Figures

    @property
    def above(self) -> int:
        """Bytes that the process used in addition to the bare process."""
        node = self.figures.node
        return int(node["peak_rss_bytes"]) - int(node["bare_rss_bytes"])


@dataclass
class _Looks:
    """Measurements taken in turn: bytes per second of the disk, and tokens per second."""

    disk: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)


def bench(quick: bool) -> Result:
    """Measure the sweep of budgets, and the pairs."""
    model = smollm2() if quick else llama_1b_f32()
    pack = open_model(str(model.path), "f32", default_cache())
    size, shares = pack.weight_bytes, SHARES[::5] if quick else SHARES
    budgets = [int(share * size) for share in shares]
    figures = _in_turns(pack, budgets, *((1, 0.2, 1) if quick else (TURNS, ROUND_S, ROUNDS)))
    trials = [Trial(*one) for one in zip(shares, budgets, figures, strict=True)]
    steps = [_step(pack, *two, 1 if quick else CLOSE_PAIRS) for two in pairwise(trials)]
    everything, unscheduled = _placed(pack, size), RunOptions(str(pack.path), context=CONTEXT, scheduler=False)
    ratios = list(_parity(everything, unscheduled, *((2, 1) if quick else (LOADS, PAIRS // LOADS))))
    notes = NOTES.format(
        name=f"{model.name}, packed in f32", size=size / MIB, context=CONTEXT, pairs=len(ratios),
        turns=TURNS, rounds=ROUNDS, seconds=ROUND_S, loads=LOADS, near=NEAR, close=CLOSE_PAIRS,
    )  # fmt: skip
    checks = list(_checks(trials, steps, ratios))
    tables = [Table("Budgets", [_row(one) for one in trials]), side_by_side(pack, 1 if quick else ROUNDS)]
    return Result("Memory budgets", notes, tables, checks, [_plot(trials)])


def _in_turns(pack: Pack, budgets: Sequence[int], turns: int, seconds: float, rounds: int) -> list[Figures]:
    """Return the figures of each budget, pooled from `turns` processes. The budgets take turns."""
    figures: list[list[Figures]] = [[] for _ in budgets]
    for _ in range(turns):
        for budget, known in zip(budgets, figures, strict=True):
            known.append(measured(pack.path, budget, seconds, rounds))
    return [pooled(known) for known in figures]


def pairs(one: RunOptions, other: RunOptions, count: int, tokens: int) -> Iterator[float]:
    """Yield the tokens per second of placement `one` over those of `other`, in `count` alternating pairs."""
    with Session(one) as first, Session(other) as second:
        for session in (first, second):
            decode(session, 2)
        for number in range(count):
            order = [first, second] if number % 2 else [second, first]
            speeds = {id(session): decode(session, tokens) for session in order}
            yield speeds[id(first)] / speeds[id(second)]


def side_by_side(pack: Pack, rounds: int) -> Table:
    """Measure the disk and a node with all weights resident, alone and together in turn; return medians."""
    disk = disk_for(sorted({block.path for block in pack.walk()}), default_cache())
    alone, beside = _Looks(), _Looks()
    with Session(_placed(pack, 2 * pack.weight_bytes)) as session, ThreadPoolExecutor(1) as aside:
        decode(session, 2)
        for _ in range(rounds):
            alone.disk.append(raw_speed(pack, disk))
            alone.speed.append(decode(session, _ASIDE_TOKENS))
            reading = aside.submit(raw_speed, pack, disk, pack.weight_bytes, _ASIDE_S)
            while not reading.done():
                speed = decode(session, _ASIDE_TOKENS)
                if not reading.done():
                    beside.speed.append(speed)
            beside.disk.append(reading.result())
    rows: list[Row] = [
        {"": name, "disk MB/s": round(median(looks.disk) / 1e6), "everything in memory, tok/s": median(looks.speed)}
        for name, looks in (("alone", alone), ("while the other runs", beside))
    ]
    return Table("Reading and computing", rows)


def _parity(everything: RunOptions, unscheduled: RunOptions, loads: int, count: int) -> Iterator[float]:
    """Yield the speed of `everything` over that of `unscheduled`, in `count` pairs after each of `loads` loads.

    Both are loaded anew each time, and which of the two is loaded first alternates.
    """
    for load in range(loads):
        if load % 2:
            yield from (1 / ratio for ratio in pairs(unscheduled, everything, count, PARITY_TOKENS))
        else:
            yield from pairs(everything, unscheduled, count, PARITY_TOKENS)


def _placed(pack: Pack, budget: int) -> RunOptions:
    return RunOptions(str(pack.path), context=CONTEXT, memory=budget)


def _step(pack: Pack, smaller: Trial, larger: Trial, count: int) -> float:
    """Return the speed at the larger budget over the speed at the smaller one.

    If the measured ratio is close to 1, the two are measured again in alternating pairs.
    """
    ratio = larger.figures.speed / smaller.figures.speed
    if ratio >= 1 + NEAR:
        return ratio
    return median(pairs(_placed(pack, larger.budget), _placed(pack, smaller.budget), count, PAIR_TOKENS))


def _checks(trials: Sequence[Trial], steps: Sequence[float], ratios: Sequence[float]) -> Iterator[Check]:
    bare = max(one.figures.node["bare_rss_bytes"] for one in trials) / MIB
    most, least = max(one.above / one.budget for one in trials), min(one.figures.reached for one in trials)
    yield Check("most memory above the bare process, times the budget", most, 1.0, at_most=True)
    yield Check("bare master, MiB", bare, MASTER_BARE, at_most=True)
    yield Check("speed, times that of the next smaller budget: least", min(steps), 1.0)
    yield Check("speed, times the possible: least", least, REACHED)
    yield Check(f"speed when all fits, times --no-scheduler: median of {len(ratios)} pairs", median(ratios), PARITY)


def _row(one: Trial) -> Row:
    figures, node = one.figures, one.figures.node
    return {
        "share": f"{one.share:.0%}",
        "budget MiB": round(one.budget / MIB),
        "bare MiB": round(node["bare_rss_bytes"] / MIB),
        "planned MiB": round(node["planned_bytes"] / MIB),
        "peak MiB": round(one.above / MIB),
        "tok/s": figures.speed,
        "resident tok/s": figures.typical("resident"),
        "streamed MiB/token": round(figures.typical("streamed") / MIB),
        "disk MB/s": round(node["disk_mb_per_s"]),
        "raw MB/s": round(figures.typical("raw") / 1e6),
        "stall ms/token": float(node["io_stall_ms_per_token"]),
        "reached": figures.reached,
    }


def _plot(trials: Sequence[Trial]) -> Bars:
    groups = [f"{one.share:.0%}" for one in trials]
    speeds = [one.figures.speed for one in trials]
    possible = [one.figures.typical("possible") for one in trials]
    return Bars("Speed by memory budget", "tok/s", groups, {"TPI": speeds, "possible": possible})
