"""One block's load from disk into its place in memory, and the disk as a source of blocks."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from scheduler.slots.cache import Source
from scheduler.slots.shelf import Load
from scheduler.storage.disk import Disk, read_chunk, read_extent
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes
from tpi.errors import WeightsError

Verify = Callable[[int, Bytes], None]  # gets a block and its bytes; raises WeightsError if the bytes are wrong


def check(verify: Verify, block: int, disk: Disk, extent: Extent, slot: Bytes) -> None:
    """Verify the bytes of `extent` that were read into `slot`; if they are wrong, read and verify them once more.

    Raises:
        WeightsError: if the bytes are wrong again, or cannot be read.
    """
    try:
        verify(block, extent.view(slot))
    except WeightsError:
        verify(block, read_extent(disk, extent, slot))


class BlockLoad(Load):
    """A load of `block` into `slot`, in chunks that several threads read at once.

    Attributes:
        requested: the time at which the load was created, in seconds. Waking a reader thus counts as loading.
        ended: the time at which it ended, in seconds; 0 before.
    """

    def __init__(self, shelf: Any, block: int, place: int, extent: Extent, slot: Bytes, chunk: int) -> None:
        super().__init__(shelf, block, place, parts=-(-extent.slot_bytes // chunk))
        self.block, self.extent, self.slot = block, extent, slot
        self.view = extent.view(slot)
        self.requested, self.ended = time.perf_counter(), 0.0
        self._chunk = chunk
        self._front = 0  # number of the first chunk that has not been read; chunks end in any order
        self._beyond = set[int]()  # numbers of later chunks that have been read

    def may_begin(self) -> bool:
        """Return True unless a cancelled load is still being read into the same place."""
        return bool(self.shelf.may_begin(self))

    def arrived(self, part: int) -> None:
        """Record that part number `part` was read."""
        self._beyond.add(part)
        while self._front in self._beyond:
            self._beyond.remove(self._front)
            self._front += 1

    def has(self, nbytes: int) -> bool:
        """Return True if the first `nbytes` bytes of the block have been read."""
        return self.arrived_bytes >= nbytes

    @property
    def arrived_bytes(self) -> int:
        """Bytes of the block that have been read without a gap, counted from its first."""
        return min(max(0, self._front * self._chunk - self.extent.skew), self.extent.nbytes)


class BlockSource(Source):
    """The blocks of a node on its disk. A block is compared with its hash when it is first loaded."""

    def __init__(self, disk: Disk, blocks: int, verify: Verify | None) -> None:
        """Read from `disk`; `verify` raises WeightsError if a block's bytes are wrong.

        If `verify` is None, nothing is verified.
        """
        self._disk, self._verify = disk, verify
        self.checks = verify is not None
        self.unverified = set(range(blocks)) if verify else set()

    def fill(self, loads: Sequence[Load], part: int) -> int:
        """Read chunk number `part` of the load in `loads`; return the bytes that were read, whole pages.

        Raises:
            WeightsError: if the chunk cannot be read in two attempts; names the file.
        """
        (load,) = loads
        assert isinstance(load, BlockLoad)
        start = part * self._disk.chunk
        read_chunk(self._disk, load.extent, load.slot, start)
        return min(self._disk.chunk, load.extent.slot_bytes - start)

    def check(self, load: Load) -> None:
        """Verify a block at its first load; if it is wrong, read and verify it once more."""
        assert isinstance(load, BlockLoad)
        if self._verify is not None and load.block in self.unverified:
            check(self._verify, load.block, self._disk, load.extent, load.slot)
            self.unverified.discard(load.block)
