"""The speed of this machine's disk, measured when a plan depends on it; without model files, on a file of its own."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from scheduler.storage.tune import disk_for
from tpi.system.private import make_private
from worker.measure.speed import disk_rate, known_disk
from worker.plan.speeds import OF_DISK

_SAMPLE = 64 << 20  # bytes of the file that is written where the cache has no files to read
_PIECE = 1 << 20  # bytes that are written at once


def own_disk(cache: Path) -> float:
    """Return the bytes per second at which the disk of `cache` is read while all cores compute; measure it if unknown.

    A measurement takes about three seconds: it reads the files in the cache or, if there are too few, a file that it
    writes first. Return 0 if the disk cannot be written or read.
    """
    if known := known_disk(cache):
        return known
    if measured := disk_rate(cache):
        return measured.read
    with suppress(OSError):
        make_private(cache)
        with NamedTemporaryFile(dir=cache, prefix="disk-") as file:
            for _ in range(_SAMPLE // _PIECE):
                file.write(os.urandom(_PIECE))  # a file system may compress zeros
            file.flush()
            os.fsync(file.fileno())
            return OF_DISK * disk_for([Path(file.name)], cache).bytes_per_second
    return 0.0
