"""One layer's records: where they are on disk, how many of them there is room for, and what is known of each."""

from dataclasses import dataclass

import numpy as np

from scheduler.demand.records.reads import Bounds, ReadSizes, RecordRead, covered, dealt, plan_ranges
from scheduler.demand.records.table import F64, I32, NEURON_BYTES, SLOT_BYTES, RecordTable
from scheduler.neurons.worth import NeuronWorth
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes

_WORTH_BYTES = 3 * 8  # of a neuron: its frequency as profiled and of late, and what it is worth while slots are chosen
HALF_LIFE = 8.0  # tokens: nothing is crossed but a disk, so that a habit may be taken up sooner than on an accelerator


@dataclass(frozen=True, eq=False)
class RecordLayer:
    """What is known of a layer before anything is read.

    Attributes:
        name: what traces and errors call it.
        extent: of all of this node's records of it, back to back.
        record_bytes: bytes of each.
        frequency: `[records]`, how often each is active, 0 to 1.
        slots: how many of them there is room for.
    """

    name: str
    extent: Extent
    record_bytes: int
    frequency: F64
    slots: int

    @property
    def neurons(self) -> int:
        """Of this node, the padding of the last unit included."""
        return len(self.frequency)

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return self.slots * self.record_bytes

    @property
    def overhead(self) -> int:
        """Bytes of what is known of each neuron and slot."""
        return (NEURON_BYTES + _WORTH_BYTES) * self.neurons + SLOT_BYTES * self.slots


class OpenLayer:
    """A layer's slots while it is used. Not safe from several threads: the tier asks under its lock."""

    def __init__(self, layer: RecordLayer, sizes: ReadSizes) -> None:
        """Read in reads of such `sizes`."""
        self.layer = layer
        self.worth = NeuronWorth(layer.frequency, half_life=HALF_LIFE)
        self.expected: I32 | None = None  # pinned until the next hold
        self.along = 0
        self.error: Exception | None = None  # the latest that a read of it failed with
        self._sizes = sizes
        self.lay(None)

    def lay(self, data: Bytes | None) -> None:
        """Have the slots in `data`, nothing in them, or none at all; nothing is pinned or on its way."""
        slots = 0 if data is None else self.layer.slots
        self.data: Bytes = np.empty(0, np.uint8) if data is None else data
        self.records = self.data.reshape(slots, self.layer.record_bytes)
        self.table = RecordTable(self.layer.neurons, slots)

    def hottest(self) -> I32:
        """What is active most often, as far as is known, in order: what fills the slots."""
        hot = np.argsort(-self.worth.frequency, kind="stable")[: len(self.table)]
        return np.sort(hot).astype(np.int32)

    def request(self, neurons: I32, readers: int) -> tuple[int, list[RecordRead]] | None:
        """Pin these; how many of them lacked, and the reads that bring them. None where there is no room now."""
        values = self.worth.values(neurons)
        lacking = self.table.pin(neurons, values)
        if lacking is None:
            return None
        ranges = plan_ranges(lacking, self._sizes, self.layer.neurons)
        kept = np.sort(np.concatenate([lacking, self._passing(ranges, len(lacking), values)]))
        self.along += len(kept) - len(lacking)
        return len(lacking), dealt(ranges, kept, self.table.slot_of[kept], readers)

    def release_expected(self) -> None:
        """What was expected is not held."""
        if self.expected is not None:
            self.table.unpin(self.expected)
            self.expected = None

    def _passing(self, ranges: list[Bounds], asked: int, values: F64) -> I32:
        """Of the records between those that are asked for, what is kept."""
        if sum(last - first for first, last in ranges) == asked:
            return np.empty(0, np.int32)
        every = covered(ranges)
        return self.table.adopt(every[self.table.slot_of[every] < 0], values)
