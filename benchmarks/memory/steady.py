"""Waits of a node for its disk, predicted and measured, on SmolLM2 with emulated disks and links."""

from collections.abc import Iterator

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.machine import MIB
from benchmarks.support.models import smollm2
from scheduler.storage.disk import DirectDisk, Disk
from scheduler.window.stats import SAMPLES
from tests.support.cluster.single import Pace, Setting, pace, single_node
from tests.support.disks import ThrottledDisk
from tpi.config import default_cache
from tpi.net.questions import Steady
from tpi.pack.library.locate import open_model
from tpi.pack.reader import Pack

SPEEDS = (150e6, 250e6, 350e6, 500e6, 900e6)  # bytes per second of the emulated disks
EXCHANGE = 0.003  # seconds of an emulated allreduce, in the grid
SLOW_EXCHANGE = 0.005
SETTINGS = {
    "window 1": Setting(window=1),
    "window 2": Setting(window=2),
    "window 3": Setting(window=3),
    "window 4": Setting(window=4),
    "window 2, retain 4": Setting(window=2, retain=4),
    "window 2, retain 2": Setting(window=2, retain=2),
    "window 3, retain 1": Setting(window=3, retain=1),
    "75 MiB": Setting(memory=75 * MIB),
    "100 MiB": Setting(memory=100 * MIB),
}
NOTES = f"""
SmolLM2-135M Q4_1 on one node; an allreduce is emulated by sleeping. The first table has an allreduce of
{SLOW_EXCHANGE * 1e3:.0f} ms and the real disk, and shows how long each window waits. The second has an allreduce of
{EXCHANGE * 1e3:.0f} ms and disks that a token bucket slows down. It compares the stall per token that
`scheduler.model.steady` predicts, from the block times measured in the same run, with the measured stall. Both are
medians over the same {SAMPLES} tokens. They agree if they differ by at most max(10%, 2% of the token time). `steady` is
a stall of less than 2% of the token time. The third begins with a window of one on
each of these disks. It shows the setting that TPI then advises, and the stall with it. So it tests whether costs that
are measured with one placement predict another.
"""


def bench(quick: bool) -> Result:
    """Compare the predicted waits for the disk with measured ones, in three tables."""
    pack = open_model(str(smollm2().path), "auto", default_cache())
    tokens = 6 if quick else SAMPLES
    hidden = [_hidden(pack, window, tokens) for window in (1, 2, 3, 4)]
    grid = list(_grid(pack, SPEEDS[::2] if quick else SPEEDS, list(SETTINGS)[:: 4 if quick else 1], tokens))
    advised = [_advised(pack, speed, tokens) for speed in (SPEEDS[::2] if quick else SPEEDS)]
    shares = [float(row["stall, share of the token"]) for row in hidden]
    checks = [
        Check("stall at the smallest window, share of the token time", shares[0], 0.03, at_most=True),
        Check("share of predicted stalls that agree", _share(grid, "agrees"), 1.0),
        Check("share of verdicts that agree", _share(grid, "verdict agrees"), 1.0),
        Check("share of advice that ends the waiting", _share(advised, "steady"), 1.0),
    ]
    tables = [
        Table("Windows over a slow link", hidden),
        Table(f"Predicted and measured stall, {len(grid)} cases", grid),
        Table("Advice, and its effect", advised),
    ]
    return Result("Steady state", NOTES, tables, checks)


def _hidden(pack: Pack, window: int, tokens: int) -> Row:
    measured, _ = _measure(pack, Setting(window=window, exchange=SLOW_EXCHANGE), tokens, None)
    return {
        "window": window,
        "token ms": measured.token * 1e3,
        "stall ms": measured.stall * 1e3,
        "stall, share of the token": measured.stall / measured.token,
    }


def _grid(pack: Pack, speeds: tuple[float, ...], names: list[str], tokens: int) -> Iterator[Row]:
    for speed in speeds:
        for name in names:
            chosen = SETTINGS[name]
            setting = Setting(chosen.memory, chosen.window, chosen.retain, EXCHANGE)
            measured, steady = _measure(pack, setting, tokens, ThrottledDisk(DirectDisk(), speed))
            off = abs(steady.stall_s - measured.stall)
            is_steady = measured.stall <= 0.02 * measured.token
            yield {
                "disk MB/s": round(speed / 1e6),
                "placement": name,
                "token ms": measured.token * 1e3,
                "stall ms": measured.stall * 1e3,
                "predicted ms": steady.stall_s * 1e3,
                "loose": str(steady.loose),
                "tight": str(steady.tight),
                "steady": str(is_steady),
                "predicted": str(steady.steady),
                "agrees": str(off <= max(0.1 * measured.stall, 0.02 * measured.token)),
                "verdict agrees": str(steady.steady == is_steady),
            }


def _advised(pack: Pack, speed: float, tokens: int) -> Row:
    """Measure with a window of one layer, apply the advice that the waits lead to, and measure again."""
    disk = ThrottledDisk(DirectDisk(), speed)
    before, steady = _measure(pack, Setting(window=1, exchange=EXCHANGE), tokens, disk)
    better, advice = _advice(steady)
    after, _ = _measure(pack, better, tokens, disk)
    return {
        "disk MB/s": round(speed / 1e6),
        "stall ms, window 1": before.stall * 1e3,
        "advice": advice,
        "token ms": after.token * 1e3,
        "stall ms": after.stall * 1e3,
        "steady": str(after.stall <= 0.02 * after.token),
    }


def _advice(steady: Steady) -> tuple[Setting, str]:
    if steady.window:
        retain = f", retain {steady.retain}" if steady.retain else ""
        advised = Setting(window=steady.window, retain=steady.retain, exchange=EXCHANGE)
        return advised, f"window {steady.window}{retain}"
    if steady.steady:
        return Setting(window=1, exchange=EXCHANGE), "none"
    return Setting(memory=steady.least_memory, exchange=EXCHANGE), f"{steady.least_memory / MIB:.0f} MiB"


def _measure(pack: Pack, setting: Setting, tokens: int, disk: Disk | None) -> tuple[Pace, Steady]:
    with single_node(pack, setting, disk) as (engine, node):
        measured, steady = pace(engine, node, tokens), node.steady()
        assert steady is not None, "nothing is streamed"
        return measured, steady


def _share(rows: list[Row], column: str) -> float:
    return sum(row[column] == "True" for row in rows) / max(1, len(rows))
