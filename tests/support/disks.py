"""Disks for tests and benchmarks: files in memory, and a disk that is slowed to a given speed."""

import errno
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from scheduler.storage.disk import DEFAULT_CHUNK, Disk
from tpi.devices.pages import Bytes


class MemoryDisk:
    """Files that are byte strings."""

    def __init__(self, files: Mapping[Path, bytes], chunk: int = DEFAULT_CHUNK, threads: int = 1) -> None:
        self.chunk = chunk
        self.threads = threads
        self._files = files

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Copy from the byte string that represents the file; return the number of bytes."""
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        found = self._files[path][offset : offset + into.size]
        into[: len(found)] = np.frombuffer(found, np.uint8)
        return len(found)


class ThrottledDisk:
    """A disk that is slowed to `bytes_per_second`: reads queue for one link, and idle time is not saved up."""

    def __init__(self, disk: Disk, bytes_per_second: float) -> None:
        self.chunk = disk.chunk
        self.threads = disk.threads
        self._disk = disk
        self._speed = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        """Read from the other disk; return when the throttled link would have delivered the bytes."""
        with self._lock:
            self._free_at = max(time.perf_counter(), self._free_at) + into.size / self._speed
            done_at = self._free_at
        got = self._disk.read(path, offset, into)
        time.sleep(max(0.0, done_at - time.perf_counter()))
        return got
