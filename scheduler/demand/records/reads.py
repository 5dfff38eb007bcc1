"""Planning of the reads that load some records of a file.

A read takes a fixed time, `start` seconds, plus the time of its bytes. If the bytes between two records take less than
`start`, they are read too: that is faster than a second read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from scheduler.slots.table import I32
from scheduler.storage.disk import DirectDisk
from scheduler.storage.extent import Extent
from scheduler.storage.tune import measure_reads
from tpi.devices.pages import PAGE, round_up

USUAL_GAP = 32 << 10  # bytes between two records up to which they are read together, without a measurement
MOST_GAP = 64 << 10  # upper limit of the measured gap: on a busy machine the fixed time is overestimated
LONGEST = 128 << 10  # bytes of a read: longer ones are divided among several readers
_SMALL, _LARGE = 2 * PAGE, 64 * PAGE  # bytes of the two sizes of reads that measure a disk
_SECONDS, _READS, _ROUNDS = 0.02, 512, 3  # limits for each size; the fastest round counts

Bounds = tuple[int, int]
"""A range of neurons `[first, last)`."""


@dataclass(frozen=True, eq=False)
class RecordRead:
    """Ranges of records that one thread reads; of these records, `neurons` (ascending) are copied to `slots`."""

    ranges: Sequence[Bounds]
    neurons: I32
    slots: I32


@dataclass(frozen=True)
class ReadSizes:
    """The limits of reads, in records.

    Attributes:
        gap: two records with more than this number of others between them are read separately.
        most: the longest read.
        least: the shortest read.
    """

    gap: int
    most: int
    least: int = 1

    @classmethod
    def of(cls, record_bytes: int, gap: int, least: int = 0) -> "ReadSizes":
        """Return the limits for records of `record_bytes` bytes. Here `gap` and `least` are in bytes, not records."""
        most = max(1, LONGEST // record_bytes)
        return cls(gap // record_bytes, most, min(most, max(1, -(-least // record_bytes))))


def plan_ranges(neurons: I32, sizes: ReadSizes, end: int) -> list[Bounds]:
    """Return the ranges of records to read so that all of `neurons` (ascending, distinct) are read.

    A range that is shorter than `sizes.least` is extended by the records after it, but not beyond record `end`, the
    number of the layer's records.
    """
    if not len(neurons):
        return []
    cuts = np.flatnonzero(np.diff(neurons) > max(sizes.gap + 1, sizes.least))
    firsts = neurons[np.concatenate([[0], cuts + 1])]
    lasts = np.minimum(np.maximum(neurons[np.concatenate([cuts, [-1]])] + 1, firsts + sizes.least), end)
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return [part for first, last in pairs for part in _cut(first, last, sizes.most)]


def neurons_in(ranges: Sequence[Bounds]) -> I32:
    """Return the numbers of all neurons in `ranges`, int32, in order."""
    parts = [np.arange(first, last, dtype=np.int32) for first, last in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def divide_ranges(ranges: Sequence[Bounds], neurons: I32, slots: I32, readers: int) -> list[RecordRead]:
    """Divide `ranges` equally among `readers` threads; return what each thread reads.

    `neurons` (ascending, all in `ranges`) are the neurons to copy, and `slots` are their slots.
    """
    each = -(-len(ranges) // readers) if ranges else 1
    return [_read_of(ranges[at : at + each], neurons, slots) for at in range(0, len(ranges), each)]


def range_extent(whole: Extent, record_bytes: int, first: int, last: int) -> Extent:
    """Return the byte range of the records `[first, last)`, which lie one after the other in `whole`."""
    return Extent(whole.path, whole.offset + first * record_bytes, (last - first) * record_bytes)


def staging_bytes(record_bytes: int) -> int:
    """Return the bytes of staging memory that a reader needs for one read; records need not be aligned."""
    return round_up(max(LONGEST, record_bytes)) + PAGE


def measured_gap(extents: Sequence[Extent], disk: DirectDisk) -> int:
    """Return how many bytes `disk` transfers in the fixed time of a read (`start`), at most `MOST_GAP`.

    The measurement reads two sizes at random places of `extents`, with `disk.threads` threads. If there is nothing to
    read or the disk cannot be read, return `USUAL_GAP`; later reads will report the error.
    """
    rounds = [[_seconds(extents, disk, size) for size in (_SMALL, _LARGE)] for _ in range(_ROUNDS)]
    small, large = (min(filter(None, each), default=0.0) for each in zip(*rounds, strict=True))
    if not small or not large:
        return USUAL_GAP
    each = max(0.0, (large - small) / (_LARGE - _SMALL))
    start = max(0.0, small - _SMALL * each)
    return min(MOST_GAP, int(start / each)) if each else MOST_GAP


def _seconds(extents: Sequence[Extent], disk: DirectDisk, size: int) -> float:
    """Return the mean seconds of a read of `size` bytes while all of the disk's threads read.

    Return 0 if no read was possible.
    """
    long = [extent for extent in extents if extent.nbytes >= size + PAGE]
    if not long:
        return 0.0
    random = Random(size)
    places = [(random.choice(long), random.random()) for _ in range(_READS)]
    drawn = [Extent(one.path, round_up(one.offset) + int(at * (one.nbytes - size - PAGE)) // PAGE * PAGE, size)
             for one, at in places]  # fmt: skip
    speed = measure_reads(drawn, DirectDisk(size, disk.threads, disk.direct), seconds=_SECONDS)
    return size / speed if speed else 0.0


def _cut(first: int, last: int, most: int) -> Iterator[Bounds]:
    for at in range(first, last, most):
        yield at, min(at + most, last)


def _read_of(ranges: Sequence[Bounds], neurons: I32, slots: I32) -> RecordRead:
    begin, end = np.searchsorted(neurons, (ranges[0][0], ranges[-1][1]))
    return RecordRead(ranges, neurons[begin:end], slots[begin:end])
