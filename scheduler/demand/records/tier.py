"""Records of a node's neurons in slots, read from disk when they are needed: a tier for models larger than memory.

    tier.attach(memory); tier.fill()             # slots with the neurons that are active most often
    tier.expect(layer, neurons)                  # a prediction: reads begin
    with tier.hold(layer, neurons) as slots:     # waits until all are loaded; int32, in the order of the neurons
        ...                                      # tier.layers[layer].data has the records by slot

The memory for slots is fixed before anything is read. Neurons are evicted by their importance, v = a + lambda f
(`scheduler.neurons.importance`). The rules of holds, reads and failures are those of
`scheduler.slots.cache.SlotCache`; each layer is a shelf of one cache. Only one thread may hold records, and each layer
has at most one hold at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scheduler.demand.records.layer import RecordLayer, RecordShelf
from scheduler.demand.records.reader import RecordReader
from scheduler.demand.records.reads import USUAL_GAP, ReadSizes
from scheduler.demand.records.stats import RecordStats
from scheduler.slots.cache import SlotCache
from scheduler.slots.stats import ReadClock
from scheduler.slots.table import I32
from scheduler.slots.workers import LoadWorkers
from scheduler.storage.disk import Disk
from tpi.devices.pages import Bytes
from tpi.errors import PlanError
from tpi.progress import Progress, silent
from tpi.trace import OFF, NoTrace


class RecordTier:
    """The record tier of one node. Close the tier before its memory is released."""

    def __init__(
        self,
        layers: Sequence[RecordLayer],
        disk: Disk,
        workers: LoadWorkers,
        readers: int,
        gap: int = USUAL_GAP,
        least: int = 0,
        reads: ReadClock | None = None,
        trace: NoTrace = OFF,
    ) -> None:
        """Create a tier for `layers`, without slots.

        Args:
            disk: the disk with the records.
            workers: the `readers` threads that read.
            gap: the most bytes between two records that are read together (`reads.measured_gap`).
            least: least bytes of a read, except at the end of a layer.
            reads: the clock of another reader of the same disk.
        """
        stats, widest = RecordStats(), max((layer.record_bytes for layer in layers), default=1)
        self.layers = [
            RecordShelf(layer, ReadSizes.of(layer.record_bytes, gap, least), readers, stats) for layer in layers
        ]
        self._slots = SlotCache(RecordReader(disk, widest), workers, stats, reads=reads, trace=trace)

    def attach(self, memory: Bytes) -> None:
        """Create empty slots for all layers in `memory`, one layer after the other.

        Raises:
            PlanError: if `memory` is too small.
        """
        if memory.size < sum(each.layer.nbytes for each in self.layers):
            raise PlanError(f"{memory.size} bytes are too small for {len(self.layers)} layers' slots; raise --memory")
        at = 0
        with self._slots.lock:
            for each in self.layers:
                each.attach(memory[at : at + each.layer.nbytes])
                at += each.layer.nbytes

    def detach(self) -> None:
        """Wait until no read is running, then remove all slots. Nothing may be held. Frequencies are kept."""
        self.abandon()
        self._slots.drain()
        with self._slots.lock:
            for each in self.layers:
                each.attach(None)

    def fill(self, progress: Progress = silent) -> None:
        """Fill all slots with the neurons that are active most often, without counting. Errors are those of `hold`."""
        counted = self.stats()
        for done, each in enumerate(self.layers, 1):
            with self._slots.hold(each, each.hottest()):
                progress(done, len(self.layers))
        with self._slots.lock:
            self._slots.stats.restore(counted)

    def expect(self, layer: int, neurons: I32) -> None:
        """Announce that the next hold of `layer` will be of `neurons` (ascending); read them if there is room."""
        self._slots.expect(self.layers[layer], neurons)

    @contextmanager
    def hold(self, layer: int, neurons: I32) -> Iterator[I32]:
        """Yield the slots of `neurons` (int32, ascending, distinct) when all are loaded; hold them until the exit.

        Raises:
            WeightsError: if a record cannot be read; names the file. Other errors of a read are raised as they are.
            TpiError: if the layer has fewer slots than `neurons`, or the tier is closed.
        """
        each = self.layers[layer]
        with self._slots.hold(each, neurons) as slots:
            each.importance.update(neurons)
            yield slots

    def begin(self) -> None:
        """Add a step that reads single neurons to the statistics."""
        with self._slots.lock:
            self._slots.stats.tokens += 1

    def abandon(self) -> None:
        """Unpin all expected neurons, because they will not be held."""
        self._slots.abandon()

    def stats(self) -> RecordStats:
        """Return the counts since the tier was created."""
        return self._slots.counts()

    def close(self) -> None:
        """Begin no more reads; return when the running ones have ended. Further calls do nothing."""
        self._slots.close()
