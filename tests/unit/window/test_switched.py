"""A window whose placement is replaced between two steps: the same bytes, no more memory, recovery from a failure."""

from pathlib import Path

import numpy as np
import pytest

from scheduler.model.placement import Placement, place
from scheduler.slots.stats import ReadClock
from scheduler.storage.extent import Extent
from scheduler.window.switched import SwitchedWindow
from scheduler.window.window import MemoryWindow
from tests.support.disks import MemoryDisk
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import TpiError, WeightsError

BLOCKS, SIZE = 6, 2 * PAGE
FILE = Path("blocks.shard")


class Disk(MemoryDisk):
    broken = False

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().read(path, offset, into)


@pytest.fixture
def disk() -> Disk:
    content = np.repeat(np.arange(BLOCKS, dtype=np.uint8), SIZE).tobytes()
    return Disk({FILE: content}, threads=2)


def opened(disk: Disk) -> tuple[SwitchedWindow, Placement, Placement]:
    extents = [Extent(FILE, block * SIZE, SIZE) for block in range(BLOCKS)]
    few, many = (place([SIZE] * BLOCKS, count * SIZE) for count in (2, 5))

    def make(placement: Placement, reads: ReadClock) -> MemoryWindow:
        return MemoryWindow(extents, placement, disk, reads=reads)

    return SwitchedWindow(make, few), few, many


def check(window: SwitchedWindow) -> None:
    for block in range(BLOCKS):
        with window.hold(block) as data:
            assert (data == block).all()


def test_holds_are_the_same_ones_after_a_switch(disk: Disk) -> None:
    window, few, many = opened(disk)
    holds = [window.hold(block) for block in range(BLOCKS)]
    before = 0
    for placement in (many, few, many):
        for block, hold in enumerate(holds):
            with hold as data:
                assert (data == block).all()
        window.switch(placement)
        assert window.placement is placement
        assert window.progress >= before  # it never goes back: a watcher sees life
        before = window.progress
    check(window)
    taken = window.take()
    assert taken.holds == 4 * BLOCKS
    assert taken.read_bytes > 0
    assert window.take().holds == 0
    window.close()


def test_a_failed_switch_is_reported_and_tried_anew(disk: Disk) -> None:
    window, few, many = opened(disk)
    disk.broken = True
    with pytest.raises(WeightsError, match="could not be read"):
        window.switch(many)
    with pytest.raises(TpiError, match="closed"), window.hold(0):
        pass
    disk.broken = False
    window.switch(few)
    check(window)
    window.close()
