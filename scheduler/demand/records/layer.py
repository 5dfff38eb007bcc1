"""One layer's records (a record is one neuron's weights): their place on disk, their slots, and their importance."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.demand.records.reads import Bounds, ReadSizes, RecordRead, divide_ranges, neurons_in, plan_ranges
from scheduler.demand.records.stats import RecordStats
from scheduler.neurons.importance import NeuronImportance
from scheduler.slots.shelf import Load, PriorityShelf
from scheduler.slots.table import F64, I32, SlotTable
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes

SLOT_BYTES, NEURON_BYTES = 13, 4  # of the index, for each slot and each neuron
_WORTH_BYTES = (
    3 * 8
)  # per neuron: its profiled frequency, its recent frequency, and its priority while slots are chosen
HALF_LIFE = 8.0  # tokens: shorter than on an accelerator, because loading a record costs less than a migration


@dataclass(frozen=True, eq=False)
class RecordLayer:
    """The description of one layer's records, made before anything is read.

    Attributes:
        name: the layer's name in traces and errors.
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


@dataclass(eq=False)
class RecordLoad(Load):
    """A `Load` of records that one reader reads."""

    read: RecordRead = field(kw_only=True)


class RecordShelf(PriorityShelf[np.int32]):
    """A `PriorityShelf` of one layer's records, which says which record is in which slot."""

    def __init__(self, layer: RecordLayer, sizes: ReadSizes, readers: int, stats: RecordStats) -> None:
        """Create a shelf without slots, whose reads are limited by `sizes` and divided among `readers` threads."""
        self.layer = layer
        self.importance = NeuronImportance(layer.frequency, half_life=HALF_LIFE)
        super().__init__(layer.name, SlotTable(layer.neurons, 0, np.int32), self.importance.priority, stats)
        self._counts, self._sizes, self._readers = stats, sizes, readers
        self.attach(None)

    def attach(self, data: Bytes | None) -> None:
        """Create empty slots in the memory `data`, or no slots if it is None. No slot may be pinned or loading."""
        slots = 0 if data is None else self.layer.slots
        self.data: Bytes = np.empty(0, np.uint8) if data is None else data
        self.records = self.data.reshape(slots, self.layer.record_bytes)
        self.table = SlotTable(self.layer.neurons, slots, np.int32)

    def hottest(self) -> I32:
        """Return the neurons that are active most often, as many as there are slots, int32 in ascending order."""
        hot = np.argsort(-self.importance.frequency, kind="stable")[: len(self.table)]
        return np.sort(hot).astype(np.int32)

    def claim(self, units: I32) -> tuple[I32, Sequence[Load]]:
        """Pin neurons (ascending, distinct); return their slots, and the reads that load the missing ones."""
        self._counts.dense_bytes += self.layer.extent.nbytes
        return super().claim(units)

    def end(self, load: Load, error: Exception | None) -> None:
        """Mark the read `load` as ended. It has failed if `error` is not None."""
        assert isinstance(load, RecordLoad)
        self._counts.reads += len(load.read.ranges)
        super().end(load, error)

    def _loads(self, lacking: I32) -> Sequence[Load]:
        ranges = plan_ranges(lacking, self._sizes, self.layer.neurons)
        kept = np.sort(np.concatenate([lacking, self._passing(ranges, len(lacking))]))
        self._counts.extra += len(kept) - len(lacking)
        reads = divide_ranges(ranges, kept, self.table.slot_of[kept], self._readers)
        return [RecordLoad(self, read.neurons, read.slots, self.name, read=read) for read in reads]

    def _passing(self, ranges: list[Bounds], asked: int) -> I32:
        """Give slots to unrequested records that `ranges` contains between requested ones.

        Return the records that got one.

        Such a record gets a slot if its priority is higher than that of the record that it replaces. `asked` is the
        number of requested records.
        """
        if sum(last - first for first, last in ranges) == asked:
            return np.empty(0, np.int32)
        kept, slots = self.table.gains(self.table.missing(neurons_in(ranges)), self._priority)
        self.table.place(kept, slots)
        return kept
