"""Units on disks whose reads fail, tear and end in any order, and a cache that reads them."""

import errno
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import numpy as np

from scheduler.demand.cache import DemandCache
from scheduler.demand.loads import IdleTime
from scheduler.demand.policies import Key, PolicyChoice
from scheduler.demand.sources import DiskUnits
from scheduler.slots.workers import Readers
from scheduler.storage.extent import Extent
from tests.support.disks import MemoryDisk
from tests.support.slots import table_faults
from tpi.devices.pages import PAGE, Bytes, page_buffer

IMPORTANCE = PolicyChoice("importance")


def content(key: Key, size: int) -> bytes:
    """Return `size` bytes that differ between units and positions."""
    return ((np.arange(size) * 7 + key[0] * 31 + key[1] * 113) % 251).astype(np.uint8).tobytes()


def files_of(blocks: int, units: int, size: int) -> tuple[dict[Path, bytes], dict[Key, Extent]]:
    """Return a file for each block, with its units back to back after a header."""
    head = 100
    files = {
        Path(f"block{block}.shard"): bytes(head) + b"".join(content((block, unit), size) for unit in range(units))
        for block in range(blocks)
    }
    extents = {
        (block, unit): Extent(Path(f"block{block}.shard"), head + unit * size, size)
        for block in range(blocks)
        for unit in range(units)
    }
    return files, extents


class ShuffledDisk(MemoryDisk):
    """A disk whose reads tear, fail on request, and end one at a time in an order that a seed draws."""

    def __init__(self, files: dict[Path, bytes], threads: int, seed: int = 0) -> None:
        super().__init__(files, PAGE, threads)
        self.faults = self.reads = 0
        self._random = Random(seed)
        self._turn = threading.Condition()
        self._under_way: list[int] = []

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read from a file in the drawn order, and return the number of bytes, as `Disk.read` specifies."""
        into[: into.size // 2] = 255  # what a torn read leaves behind
        with self._turn:
            self.reads += 1
            mine = self.reads
            if self.faults:
                self.faults -= 1
                raise OSError(errno.EIO, "Input/output error")
            self._under_way.append(mine)
            self._random.shuffle(self._under_way)
            self._turn.wait_for(lambda: self._under_way[0] == mine)
            got = super().read(path, offset, into)
            self._under_way.remove(mine)
            self._turn.notify_all()
            return got


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def cache_of(
    disk_threads: int = 2,
    slots: int = 4,
    size: int = 700,
    blocks: int = 3,
    units: int = 6,
    seed: int = 0,
    choice: PolicyChoice = IMPORTANCE,
    clock: Clock | None = None,
    idle: IdleTime | None = None,
) -> Iterator[tuple[DemandCache, ShuffledDisk]]:
    """Yield a cache that reads from a shuffled disk; check that it leaves no thread."""
    files, extents = files_of(blocks, units, size)
    disk = ShuffledDisk(files, disk_threads, seed)
    source = DiskUnits(disk, extents)
    policy = choice.open(np.array([block for block, _ in source.keys]))
    before = set(threading.enumerate())
    memory = page_buffer(slots * source.slot_bytes)[: slots * source.slot_bytes]
    readers = Readers(disk_threads)
    with closing(DemandCache(source, memory, policy, readers, clock=clock or Clock(), idle=idle)) as cache:
        yield cache, disk
        assert not table_faults(cache.shelf.table)
    assert set(threading.enumerate()) <= before


def right(data: Bytes, key: tuple[int, int], size: int = 700) -> bool:
    return data.tobytes() == content(key, size)
