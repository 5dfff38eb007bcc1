"""A reader of records from disk into slots. Each thread reads into its own staging memory first."""

import threading
from collections.abc import Sequence

from scheduler.demand.records.layer import RecordLayer, RecordLoad, RecordShelf
from scheduler.demand.records.reads import RecordRead, range_extent, staging_bytes
from scheduler.slots.cache import Source
from scheduler.slots.shelf import Load
from scheduler.storage.disk import Disk, read_chunk
from tpi.devices.pages import Bytes, page_buffer

_THREAD, _CODE = 64 << 10, 2 << 20  # bytes that a thread takes, and that the code takes once it runs


class RecordReader(Source):
    """The disk as a source of records. Threads read into staging memory first: records are not aligned."""

    def __init__(self, disk: Disk, record_bytes: int) -> None:
        """Create a reader for records of at most `record_bytes` bytes."""
        self._disk = _Whole(disk)
        self._size = staging_bytes(record_bytes)
        self._threads = threading.local()

    def fill(self, loads: Sequence[Load], part: int) -> int:
        """Read the records of the one load in `loads`; return the number of bytes read. Errors are those of `read`."""
        (load,) = loads
        assert isinstance(load, RecordLoad)
        return self.read(load.shelf, load.read)

    def read(self, layer: RecordShelf, read: RecordRead) -> int:
        """Read all ranges of `read` and copy the kept records to their slots; return the number of bytes read.

        Raises:
            WeightsError: if the file is missing, too short or unreadable at two attempts; names the file.
        """
        size, staging, moved, end = layer.layer.record_bytes, self._staging(), 0, 0
        for first, last in read.ranges:
            extent = range_extent(layer.layer.extent, size, first, last)
            read_chunk(self._disk, extent, staging[: extent.slot_bytes], 0)
            moved += extent.slot_bytes
            begin, end = end, end + int(read.neurons[end:].searchsorted(last))
            found = extent.view(staging).reshape(-1, size)
            for neuron, slot in zip(read.neurons[begin:end].tolist(), read.slots[begin:end].tolist(), strict=True):
                layer.records[slot] = found[neuron - first]  # one by one: together they are copied twice
        return moved

    def _staging(self) -> Bytes:
        if not hasattr(self._threads, "memory"):
            self._threads.memory = page_buffer(self._size)
        memory: Bytes = self._threads.memory
        return memory


class _Whole:
    """A disk without a limit on the size of a read, so that `read_chunk` reads a whole range at once."""

    chunk = 1 << 62

    def __init__(self, disk: Disk) -> None:
        self.threads, self.read = disk.threads, disk.read


def tier_bytes(layers: Sequence[RecordLayer], readers: int) -> int:
    """Return the bytes that a tier with `readers` reader threads takes: slots, index and staging memory."""
    widest = max((layer.record_bytes for layer in layers), default=1)
    own = sum(layer.nbytes + layer.overhead for layer in layers)
    return _CODE + own + readers * (staging_bytes(widest) + _THREAD)
