"""Disks and files for tests of the memory window."""

import threading
from pathlib import Path

import numpy as np

from scheduler.storage.extent import Extent
from tests.support.disks import MemoryDisk
from tpi.devices.pages import PAGE, Bytes


def content(block: int, size: int) -> bytes:
    """Return `size` bytes that differ between blocks and positions."""
    return ((np.arange(size) * 7 + block * 31) % 251).astype(np.uint8).tobytes()


def make_blocks(sizes: list[int]) -> tuple[dict[Path, bytes], list[Extent]]:
    """Write one file per block, with a header of one page; return the blocks' extents."""
    files = {Path(f"block{b}.shard"): bytes(PAGE) + content(b, size) for b, size in enumerate(sizes)}
    return files, [Extent(path, PAGE, size) for path, size in zip(files, sizes, strict=True)]


class CountingDisk(MemoryDisk):
    """A disk that counts reads per file, and lets a test wait for a number of reads."""

    def __init__(self, files: dict[Path, bytes], chunk: int = 1 << 20, threads: int = 2) -> None:
        super().__init__(files, chunk, threads)
        self.reads: dict[str, int] = {}
        self._changed = threading.Condition()

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read from the file, count the read, and return the number of bytes, as `Disk.read` specifies."""
        got = super().read(path, offset, into)
        with self._changed:
            self.reads[path.stem] = self.reads.get(path.stem, 0) + 1
            self._changed.notify_all()
        return got

    def wait_for(self, name: str, reads: int, seconds: float = 10) -> bool:
        """Wait until the file `name` was read `reads` times; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self.reads.get(name, 0) >= reads, seconds)
