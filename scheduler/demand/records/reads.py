"""Which reads fetch some records of a file: neighbours together, and what lies between them where that is cheaper.

A read takes `start` seconds and its bytes' time. Bytes that nobody asked for and that take less than `start` are read
along: that is sooner than to begin anew, and a disk that is asked for little at a time gives little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from scheduler.demand.records.table import I32
from scheduler.storage.disk import DirectDisk
from scheduler.storage.extent import Extent
from scheduler.storage.tune import measure_reads
from tpi.devices.pages import PAGE, round_up

USUAL_GAP = 32 << 10  # bytes between two records that are read along, where nothing was measured
MOST_GAP = 64 << 10  # whatever was measured: beside other work a read takes long to begin, and a long one as well
LONGEST = 128 << 10  # bytes of a read: longer ones are cut, so that several readers share them
_SMALL, _LARGE = 2 * PAGE, 64 * PAGE  # bytes of the reads that a disk is measured by
_SECONDS, _READS, _ROUNDS = 0.02, 512, 3  # each size at most; the fastest round counts

Bounds = tuple[int, int]
"""Neurons `[first, last)`."""


@dataclass(frozen=True, eq=False)
class RecordRead:
    """Ranges of records that one reader reads, and what it keeps of them: `neurons`, in order, go to `slots`."""

    ranges: Sequence[Bounds]
    neurons: I32
    slots: I32


@dataclass(frozen=True)
class ReadSizes:
    """In records: what may lie between two that are read together, how long a read may be, and is at least."""

    gap: int
    most: int
    least: int = 1

    @classmethod
    def of(cls, record_bytes: int, gap: int, least: int = 0) -> "ReadSizes":
        """From bytes."""
        most = max(1, LONGEST // record_bytes)
        return cls(gap // record_bytes, most, min(most, max(1, -(-least // record_bytes))))


def plan_ranges(neurons: I32, sizes: ReadSizes, end: int) -> list[Bounds]:
    """The ranges of `sizes` that have all of `neurons`, in order and each once; none goes beyond record `end`.

    Where a range is lengthened, it is by what follows; at the end of a layer there may be less than `least`.
    """
    if not len(neurons):
        return []
    cuts = np.flatnonzero(np.diff(neurons) > max(sizes.gap + 1, sizes.least))
    firsts = neurons[np.concatenate([[0], cuts + 1])]
    lasts = np.minimum(np.maximum(neurons[np.concatenate([cuts, [-1]])] + 1, firsts + sizes.least), end)
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return [part for first, last in pairs for part in _cut(first, last, sizes.most)]


def covered(ranges: Sequence[Bounds]) -> I32:
    """Every neuron of these ranges, in order."""
    parts = [np.arange(first, last, dtype=np.int32) for first, last in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def dealt(ranges: Sequence[Bounds], neurons: I32, slots: I32, readers: int) -> list[RecordRead]:
    """The reads of all `ranges`, in about equal numbers for so many readers; `neurons`, in order, lie in them."""
    each = -(-len(ranges) // readers) if ranges else 1
    return [_read_of(ranges[at : at + each], neurons, slots) for at in range(0, len(ranges), each)]


def range_extent(whole: Extent, record_bytes: int, first: int, last: int) -> Extent:
    """Where the records `[first, last)` are in the file that has all of them from `whole` on."""
    return Extent(whole.path, whole.offset + first * record_bytes, (last - first) * record_bytes)


def staging_bytes(record_bytes: int) -> int:
    """Bytes that a reader needs for one read, which begins anywhere in a page."""
    return round_up(max(LONGEST, record_bytes)) + PAGE


def measured_gap(extents: Sequence[Extent], disk: DirectDisk) -> int:
    """Bytes that `disk` reads in the time that a read takes to begin, from drawn places of `extents`.

    Two sizes are read by as many threads as will read. Nothing to read, or a disk that cannot be read, gives the
    usual figure: who reads in earnest says what is wrong.
    """
    rounds = [[_seconds(extents, disk, size) for size in (_SMALL, _LARGE)] for _ in range(_ROUNDS)]
    small, large = (min(filter(None, each), default=0.0) for each in zip(*rounds, strict=True))
    if not small or not large:
        return USUAL_GAP
    each = max(0.0, (large - small) / (_LARGE - _SMALL))
    start = max(0.0, small - _SMALL * each)
    return min(MOST_GAP, int(start / each)) if each else MOST_GAP


def _seconds(extents: Sequence[Extent], disk: DirectDisk, size: int) -> float:
    """Of a read of `size` bytes, beside others; 0 if there is none."""
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
