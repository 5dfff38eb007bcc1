"""Predictions compared with measurements: verdict and waiting over emulated disk speeds, windows and budgets."""

import time
from statistics import median

import pytest

from scheduler.model.placement import Placement, place, place_window
from scheduler.model.steady import SteadyReport, judge_streaming
from scheduler.window.window import MemoryWindow
from tests.support.cluster.window_helpers import CountingDisk, make_blocks
from tests.support.disks import ThrottledDisk
from tpi.devices.pages import PAGE

LAYERS = 3
SIZES = [24 * PAGE, 48 * PAGE] * LAYERS
COMPUTE, EXCHANGE = (0.005, 0.010), 0.002  # seconds: a token is busy for 57 ms
SLOWER = (1, 1, 2, 4, 8)  # times as slow, attempt by attempt: where this machine does something else, that weighs less


def run(placement: Placement, speed: float, slower: int, tokens: int = 7) -> tuple[SteadyReport, float, float]:
    """Return the prediction, and the measured median seconds per token and of waiting, all slowed by a factor."""
    files, extents = make_blocks(SIZES)
    window = MemoryWindow(extents, placement, ThrottledDisk(CountingDisk(files, 8 * PAGE, 2), speed / slower))
    window.fill()
    seconds, stalls = [], []
    for _ in range(tokens):
        begun = time.perf_counter()
        for block in range(len(SIZES)):
            with window.hold(block):
                time.sleep(slower * COMPUTE[block % 2])
            time.sleep(slower * EXCHANGE)
        seconds.append(time.perf_counter() - begun)
        stalls.append(window.take().stall_seconds)
    window.close()
    half = tokens // 2
    return judge_streaming(placement, window.costs(), window.history()), median(seconds[half:]), median(stalls[half:])


def agree(report: SteadyReport, token: float, stall: float) -> bool:
    """Return True if waiting and verdict are as predicted; between 0.5% and 2% of the token either verdict is right."""
    near = abs(stall - report.stall_seconds) <= max(0.1 * stall, 0.02 * token)
    return near and (report.steady == (stall <= 0.02 * token) or 0.005 < stall / token < 0.02)


@pytest.mark.alone
@pytest.mark.parametrize("busy_share", [0.5, 1.3, 3.0])
@pytest.mark.parametrize(
    "placement",
    [
        place_window(SIZES, 1),
        place_window(SIZES, 2),
        place_window(SIZES, 3, retain=2),
        place(SIZES, sum(SIZES) // 2),
    ],
    ids=["window 1", "window 2", "window 3 retain 2", "half"],
)
def test_prediction_agrees_with_what_happens(placement: Placement, busy_share: float) -> None:
    """`busy_share` is the seconds that loading all blocks takes, in units of a token's busy time."""
    speed = sum(SIZES) / (busy_share * LAYERS * (sum(COMPUTE) + 2 * EXCHANGE))
    for slower in SLOWER:
        report, token, stall = run(placement, speed, slower)
        if agree(report, token, stall):
            break
    said = f"predicted a stall of {report.stall_seconds:.4f} s, measured {stall:.4f} of {token:.4f} s"
    assert agree(report, token, stall), said
