"""Counts of reads: every byte once, and the time of windows that read at once only once."""

import threading
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from master.reporting.figures import RunFigures
from scheduler.model.placement import place_window
from scheduler.model.timeline import OtherWaits
from scheduler.slots import stats as slot_stats
from scheduler.slots.stats import ReadClock
from scheduler.window import stats
from scheduler.window.stats import SAMPLES, Meter, WindowStats
from scheduler.window.window import MemoryWindow
from tests.support.cluster.window_helpers import CountingDisk, make_blocks
from tpi.devices.pages import PAGE, Bytes
from worker.service.served import Figures

SIZES = [4 * PAGE] * 4


class GatedDisk(CountingDisk):
    """A disk whose reads wait for `go`; `landed` is set some time after that."""

    def __init__(self, files: dict[Path, bytes]) -> None:
        super().__init__(files, chunk=PAGE, threads=1)
        self.go = threading.Event()

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        self.go.wait()
        return super().read(path, offset, into)


def test_a_chunk_that_lands_while_counts_are_taken_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    files, extents = make_blocks(SIZES)
    disk = GatedDisk(files)
    window = MemoryWindow(extents, place_window(SIZES, 2), disk)

    def slowly(*counts: Any) -> WindowStats:
        """Read and clear the counters slowly, so that a read may end in between."""
        disk.go.set()
        disk.wait_for("block1", 4, seconds=0.3)
        return WindowStats(*counts)

    monkeypatch.setattr(stats, "WindowStats", slowly)
    first = window.take()
    monkeypatch.undo()
    assert disk.wait_for("block1", 4)  # the ring is full
    window.close()
    assert first.read_bytes + window.take().read_bytes == window.progress == 8 * PAGE


def test_windows_that_read_at_once_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(slot_stats, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = ReadClock()
    blocks, head = Meter(1, 0, 1, clock), Meter(1, 0, 1, clock)
    for at, act in (
        (1, clock.begin_read),
        (2, clock.begin_read),
        (3, clock.end_read),
        (5, clock.end_read),
        (9, None),
    ):
        now = at
        if act:
            act()
    assert clock.seconds == 4.0
    for meter, size in ((blocks, 10), (head, 20)):
        meter.read_bytes += size
        taken = meter.take()
        assert (taken.read_bytes, taken.read_seconds) == (size, 4.0)
        assert meter.take() == WindowStats(ring_bytes=1)
    now = 10
    clock.begin_read()
    now = 12
    assert blocks.take().read_seconds == 2.0  # until now


@pytest.mark.parametrize(
    ("head", "seconds"), [(WindowStats(0, 1, read_bytes=500, read_seconds=2.5), 2.5), (WindowStats(), 2.0)]
)
def test_the_masters_disk_time_is_that_of_both_windows_once(head: WindowStats, seconds: float) -> None:
    """Blocks and head are read at once and share a clock, so their seconds count once."""
    node = SimpleNamespace(figures=lambda: Figures(streamed_bytes=1000, disk_s=2.0))
    deployment: Any = SimpleNamespace(node=node, vocabulary=SimpleNamespace(streamed=head), session=1, epoch=1)
    nobody: Any = None
    own = RunFigures(nobody, nobody, deployment, bare=0, began=0)._own_stats(None)
    assert (own.streamed_bytes, own.disk_s, own.steady) == (1000 + head.read_bytes, seconds, None)


def test_every_node_is_told_what_the_others_wait() -> None:
    """Per token: the master separates its head and rows; a worker has both as the time between two tokens."""
    nobody: Any = None
    deployment: Any = SimpleNamespace(vocabulary=SimpleNamespace(waits=(0.5, 0.25)))
    stats: list[Any] = [SimpleNamespace(stall_s=stall, tokens=10) for stall in (10.0, 40.0, 2.0)]
    begun: list[Any] = [SimpleNamespace(stall_s=0.0, tokens=0)] * 3
    waits = RunFigures(nobody, nobody, deployment, bare=0, began=0)._waits(begun, stats)
    assert waits[0] == OtherWaits(head=0.5, rows=0.25, others=4.0)
    assert waits[1] == OtherWaits(tail=0.75, others=0.25)
    assert waits[2] == OtherWaits(tail=0.75, others=4.0)


def test_waking_up_is_counted_token_by_token() -> None:
    """A token's figure is the mean over its waits, and the result is the median over tokens.

    A token without waits gets the result.
    """
    meter = Meter(2, 0, 1)
    for token in range(SAMPLES):
        assert len(meter.history()) == SAMPLES
        for block in range(2):
            meter.entered(block, 0.0)
            if token != 3:
                meter.waited(token + 2.0 * block)
            meter.left(block, 0.0, 1.0)
    means = [token + 1.0 for token in range(SAMPLES)]
    assert meter.costs().wake == median(means[:3] + means[4:])
    assert [costs.wake for costs in meter.history()] == [*means[:3], meter.costs().wake, *means[4:]]
