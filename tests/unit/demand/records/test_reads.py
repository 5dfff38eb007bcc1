"""The ranges of a read: every requested record once, and no gap that costs more than a read of its own."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.demand.records.reads import (
    MOST_GAP,
    USUAL_GAP,
    ReadSizes,
    divide_ranges,
    measured_gap,
    neurons_in,
    plan_ranges,
    staging_bytes,
)
from scheduler.storage.disk import DirectDisk
from scheduler.storage.extent import Extent
from scheduler.storage.openfiles import OpenFilesDisk
from tpi.devices.pages import PAGE, page_buffer

NEURONS = st.lists(st.integers(0, 300), unique=True, max_size=60).map(sorted).map(lambda all: np.array(all, np.int32))


@given(
    neurons=NEURONS, gap=st.integers(0, 40), most=st.integers(1, 30), least=st.integers(1, 12),
    readers=st.integers(1, 5),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_ranges_have_all_once_and_no_gap_that_is_too_long(
    neurons: np.ndarray, gap: int, most: int, least: int, readers: int
) -> None:
    least = min(least, most)
    ranges = plan_ranges(neurons, ReadSizes(gap, most, least), 301)
    every = neurons_in(ranges)
    assert len(np.unique(every)) == len(every)
    assert set(neurons.tolist()) <= set(every.tolist())
    assert all(0 < last - first <= most for first, last in ranges)
    runs = [part for part in np.split(every, np.flatnonzero(np.diff(every) > 1) + 1) if len(part)]
    assert all(len(run) >= least or run[-1] == 300 for run in runs)
    for beside in set(every.tolist()) - set(neurons.tolist()):  # between two, or what makes a read long enough
        before, after = neurons[neurons < beside], neurons[neurons > beside]
        between = len(after) and after[0] - before[-1] <= max(gap + 1, least)
        assert between or any(run[0] <= beside < run[0] + least for run in runs)
    reads = divide_ranges(ranges, neurons, neurons + 1000, readers)
    assert len(reads) <= readers
    assert [part for read in reads for part in read.ranges] == ranges
    assert np.concatenate([*(read.neurons for read in reads), np.empty(0)]).tolist() == neurons.tolist()
    assert all((read.slots == read.neurons + 1000).all() for read in reads)


def test_a_reader_has_room_for_the_longest_read_at_any_offset() -> None:
    for size in (100, 3840, 200_000):
        most = max(1, (128 << 10) // size)
        assert Extent(Path("x"), PAGE - 1, most * size).slot_bytes <= staging_bytes(size)


def test_what_a_read_takes_to_begin_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 << 20))
    assert 0 <= measured_gap([Extent(file, 100, (4 << 20) - 100)], DirectDisk()) <= MOST_GAP
    assert measured_gap([Extent(tmp_path / "none", 0, 4 << 20)], DirectDisk()) == USUAL_GAP
    assert measured_gap([Extent(file, 0, PAGE)], DirectDisk()) == USUAL_GAP


@pytest.mark.parametrize("direct", [True, False])
def test_files_that_stay_open_are_read_as_others_are(direct: bool, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = np.random.default_rng(0).integers(0, 256, 3 * PAGE + 100, np.uint8)
    file.write_bytes(content.tobytes())
    disk, into = OpenFilesDisk(DirectDisk(direct=direct)), page_buffer(2 * PAGE)
    for _ in range(2):
        assert disk.read(file, PAGE, into) == 2 * PAGE
        assert (into == content[PAGE : 3 * PAGE]).all()
    assert disk.read(file, 3 * PAGE, into) == 100  # fewer at the file's end
    with pytest.raises(FileNotFoundError):
        disk.read(tmp_path / "none", 0, into)
    disk.close()
    disk.close()
