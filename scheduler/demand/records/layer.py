"""One layer's records: their place on disk, their slots, and the frequency and worth of each."""

from dataclasses import dataclass

import numpy as np

from scheduler.demand.records.reads import Bounds, ReadSizes, RecordRead, covered, dealt, plan_ranges
from scheduler.neurons.worth import NeuronImportance
from scheduler.slots.table import F64, I32, SlotTable
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes

SLOT_BYTES, NEURON_BYTES = 13, 4  # of the index, for each slot and each neuron
_WORTH_BYTES = 3 * 8  # per neuron: its profiled frequency, its recent frequency, and its worth while slots are chosen
HALF_LIFE = 8.0  # tokens: shorter than on an accelerator, because loading a record costs less than a migration


@dataclass(frozen=True, eq=False)
class RecordLayer:
    """The description of a layer before anything is read.

    Attributes:
        name: its name in traces and errors.
        extent: the byte range of this node's records, which follow one another.
        record_bytes: bytes of a record.
        frequency: share of tokens for which each neuron is active, float64 `[records]`, 0 to 1.
        slots: number of records that memory has room for.
    """

    name: str
    extent: Extent
    record_bytes: int
    frequency: F64
    slots: int

    @property
    def neurons(self) -> int:
        """Number of this node's neurons, including the padding of the last unit."""
        return len(self.frequency)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.record_bytes

    @property
    def overhead(self) -> int:
        """Bytes of the index and the frequencies."""
        return (NEURON_BYTES + _WORTH_BYTES) * self.neurons + SLOT_BYTES * self.slots


class OpenLayer:
    """A layer's slots during a run. Not thread-safe: the tier calls it under its lock."""

    def __init__(self, layer: RecordLayer, sizes: ReadSizes) -> None:
        """Create the layer without slots; reads will have `sizes`."""
        self.layer = layer
        self.worth = NeuronImportance(layer.frequency, half_life=HALF_LIFE)
        self.expected: I32 | None = None  # pinned until the next hold
        self.along = 0
        self.error: Exception | None = None  # error of the last read that failed
        self._sizes = sizes
        self.lay(None)

    def lay(self, data: Bytes | None) -> None:
        """Put empty slots into `data`; None: have no slots. Nothing may be pinned or loading."""
        slots = 0 if data is None else self.layer.slots
        self.data: Bytes = np.empty(0, np.uint8) if data is None else data
        self.records = self.data.reshape(slots, self.layer.record_bytes)
        self.table = SlotTable(self.layer.neurons, slots, np.int32)

    def hottest(self) -> I32:
        """Return the neurons that are active most often, as many as there are slots, in ascending order."""
        hot = np.argsort(-self.worth.frequency, kind="stable")[: len(self.table)]
        return np.sort(hot).astype(np.int32)

    def request(self, neurons: I32, readers: int) -> tuple[int, list[RecordRead]] | None:
        """Pin `neurons`; return how many are missing and the reads that load them. None if there is no room now."""
        if self.table.fitting(neurons) < len(neurons):
            return None
        lacking = self.table.admit(neurons, self.worth.worth)
        ranges = plan_ranges(lacking, self._sizes, self.layer.neurons)
        kept = np.sort(np.concatenate([lacking, self._passing(ranges, len(lacking))]))
        self.along += len(kept) - len(lacking)
        return len(lacking), dealt(ranges, kept, self.table.slot_of[kept], readers)

    def release_expected(self) -> None:
        """Unpin the expected neurons."""
        if self.expected is not None:
            self.table.unpin(self.table.slot_of[self.expected])
            self.expected = None

    def _passing(self, ranges: list[Bounds], asked: int) -> I32:
        """Assign slots to those records between the requested ones that are worth keeping, and return them."""
        if sum(last - first for first, last in ranges) == asked:
            return np.empty(0, np.int32)
        every = covered(ranges)
        kept, slots = self.table.gains(self.table.lacking(every), self.worth.worth)
        self.table.place(kept, slots)
        return kept
