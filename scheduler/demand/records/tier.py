"""Records of a node's neurons in slots, read from disk when they are needed: a tier for models larger than memory.

    tier.lay(memory); tier.fill()                # slots with the neurons that are active most often
    tier.expect(layer, neurons)                  # a prediction: reads begin
    with tier.hold(layer, neurons) as slots:     # waits until all are loaded; int32, in the order of the neurons
        ...                                      # tier.layers[layer].data has the records by slot

The memory for slots is fixed before anything is read. Expected and held neurons stay; others are evicted by their
worth, v = a + lambda f (`scheduler.neurons.worth`). A failed read raises in the hold that waits for it, and names the
file; the next hold tries again. One thread holds, one hold of a layer at a time.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scheduler.demand.records.layer import OpenLayer, RecordLayer
from scheduler.demand.records.reader import RecordReader
from scheduler.demand.records.reads import USUAL_GAP, ReadSizes, RecordRead
from scheduler.demand.records.stats import RecordStats
from scheduler.demand.workers import LoadWorkers
from scheduler.slots.table import I32
from scheduler.storage.disk import Disk
from scheduler.window.stats import ReadClock
from tpi.devices.pages import Bytes
from tpi.errors import PlanError, TpiError
from tpi.progress import Progress, silent
from tpi.trace import OFF, NoTrace

_LOOK_AGAIN = 1.0  # seconds after which a waiting hold checks if its reads can still happen


class RecordTier:
    """The record tier of one node. Close it before its memory is released."""

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
            disk: where records are read from.
            workers: threads that read; there are `readers` of them.
            gap: bytes between two records up to which they are read together (`reads.measured_gap`).
            least: least bytes of a read, except at the end of a layer.
            reads: the clock of another reader of the same disk.
        """
        self.layers = [OpenLayer(layer, ReadSizes.of(layer.record_bytes, gap, least)) for layer in layers]
        widest = max((layer.record_bytes for layer in layers), default=1)
        self._reader = RecordReader(disk, widest)
        self._workers, self._reads, self._trace = workers, reads or ReadClock(), trace
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._ahead, self._demanded = deque[_Job](), deque[_Job]()
        self._stats = RecordStats()
        self._count, self._closed = readers, False
        workers.start(self._serve)

    def lay(self, memory: Bytes) -> None:
        """Put the empty slots of all layers into `memory`, one layer after the other.

        Raises:
            PlanError: if `memory` is too small.
        """
        if memory.size < sum(each.layer.nbytes for each in self.layers):
            raise PlanError(f"{memory.size} bytes are too small for {len(self.layers)} layers' slots; raise --memory")
        at = 0
        with self._lock:
            for each in self.layers:
                each.lay(memory[at : at + each.layer.nbytes])
                at += each.layer.nbytes

    def rest(self) -> None:
        """Wait until no read is running, then remove all slots. Nothing may be held. Frequencies are kept."""
        self.abandon()
        with self._lock:
            while any(each.table.loading.any() for each in self.layers) and not self._closed:
                self._done.wait(_LOOK_AGAIN)
            for each in self.layers:
                each.lay(None)

    def fill(self, progress: Progress = silent) -> None:
        """Fill all slots with the neurons that are active most often, without counting. Errors are those of `hold`."""
        counted = self.stats()
        for done, each in enumerate(self.layers, 1):
            with self._held(done - 1, each.hottest()):
                progress(done, len(self.layers))
        with self._lock:
            self._stats = counted

    def expect(self, layer: int, neurons: I32) -> None:
        """Expect that the next hold of `layer` is of `neurons` (ascending), and start reading them if there is room."""
        each = self.layers[layer]
        with self._lock:
            each.release_expected()
            if self._closed or len(neurons) > len(each.table):
                return
            if self._request(layer, neurons, self._ahead):
                each.expected = neurons

    @contextmanager
    def hold(self, layer: int, neurons: I32) -> Iterator[I32]:
        """Yield the slots of `neurons` (int32, ascending, distinct) when all are loaded; hold them until the exit.

        Raises:
            WeightsError: if a record cannot be read; names the file. Other errors of a read are raised as they are.
            TpiError: if the layer has fewer slots, or the tier is closed.
        """
        with self._held(layer, neurons) as slots:
            self.layers[layer].worth.note(neurons)
            yield slots

    @contextmanager
    def _held(self, layer: int, neurons: I32) -> Iterator[I32]:
        each = self.layers[layer]
        with self._lock:
            self._pin(layer, neurons)
            try:
                slots = self._settled(layer, neurons)
            except BaseException:
                each.table.unpin(each.table.slot_of[neurons])
                raise
        try:
            yield slots
        finally:
            with self._lock:
                each.table.unpin(slots)

    def begin(self) -> None:
        """Count a step that reads single neurons."""
        with self._lock:
            self._stats.tokens += 1

    def abandon(self) -> None:
        """Unpin all expected neurons, because they will not be held."""
        with self._lock:
            for each in self.layers:
                each.release_expected()

    def stats(self) -> RecordStats:
        """Return the counts so far."""
        with self._lock:
            self._stats.along = sum(each.along for each in self.layers)
            return self._stats.copy()

    def close(self) -> None:
        """Begin no more reads; return when the running ones have ended. Idempotent."""
        with self._lock:
            self._closed = True
            self._done.notify_all()
        self._workers.close()

    # The methods below are called with the lock held.

    def _require_open(self) -> None:
        if self._closed or self._workers.lost:
            raise TpiError("the neurons' records are closed; open the model again")

    def _pin(self, layer: int, neurons: I32) -> None:
        """Pin `neurons` in place of the expected ones, and read the missing ones before all others."""
        each = self.layers[layer]
        if each.expected is not None and each.expected is not neurons:
            each.release_expected()
        if each.expected is None:
            while not self._request(layer, neurons, self._demanded):
                if not each.table.settling:
                    raise PlanError(
                        f"{len(neurons)} neurons of {each.layer.name} cannot be held at once: memory has room for "
                        f"{len(each.table)}; raise --memory"
                    )
                self._done.wait(_LOOK_AGAIN)
        each.expected = None
        self._demanded.extend(job for job in self._ahead if job.layer == layer)
        self._ahead = deque(job for job in self._ahead if job.layer != layer)

    def _request(self, layer: int, neurons: I32, queue: "deque[_Job]") -> bool:
        """Pin `neurons` and queue the reads of the missing ones; return False if there is no room."""
        self._require_open()
        each = self.layers[layer]
        requested = each.request(neurons, self._count)
        if requested is None:
            return False
        lacking, reads = requested
        self._stats.asked += len(neurons)
        self._stats.found += len(neurons) - lacking
        self._stats.dense_bytes += each.layer.extent.nbytes
        queue.extend(_Job(layer, read) for read in reads)
        self._workers.kick(len(reads))
        return True

    def _settled(self, layer: int, neurons: I32) -> I32:
        """Wait until all of the pinned `neurons` are loaded, and return their slots."""
        each, began = self.layers[layer], 0.0
        slots: I32 = each.table.slot_of[neurons]
        while each.table.loading[slots].any():
            began = began or time.perf_counter()
            self._require_open()
            self._done.wait(_LOOK_AGAIN)
        if began:
            ended = time.perf_counter()
            self._stats.stall_seconds += ended - began
            self._trace.add("stall", each.layer.name, int(began * 1e9), int(ended * 1e9))
        if each.table.failed[slots].any():
            assert each.error is not None
            raise each.error
        return slots

    # The methods below are called by the readers.

    def _serve(self) -> None:
        """Run the most urgent job, if there is one."""
        with self._lock:
            queue = self._demanded or self._ahead
            if self._closed or not queue:
                return
            job = queue.popleft()
        began, moved, error = time.perf_counter(), 0, None
        self._reads.begin_read()
        try:
            moved = self._reader.read(self.layers[job.layer], job.read)
        except Exception as failure:  # noqa: BLE001 - the hold that waits for the records raises it
            error = failure
        self._reads.end_read()
        self._trace.add("load", self.layers[job.layer].layer.name, int(began * 1e9), int(time.perf_counter() * 1e9))
        with self._lock:
            self._finish(job, moved, error)

    def _finish(self, job: "_Job", moved: int, error: Exception | None) -> None:
        each = self.layers[job.layer]
        self._stats.reads += len(job.read.ranges)
        self._stats.read_bytes += moved
        if error is not None:
            each.error = error
        each.table.end(job.read.slots, arrived=error is None)
        self._done.notify_all()


class _Job:
    """A read of one layer."""

    __slots__ = ("layer", "read")

    def __init__(self, layer: int, read: RecordRead) -> None:
        self.layer, self.read = layer, read
