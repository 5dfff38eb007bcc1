"""Records of a node's neurons in slots, filled from disk when they are wanted: a tier for models larger than memory.

    tier.lay(memory); tier.fill()                # slots, with what is active most often in them
    tier.expect(layer, neurons)                  # a prediction: reads begin
    with tier.hold(layer, neurons) as slots:     # waits until all are there; int32, in the order of the neurons
        ...                                      # tier.layers[layer].data has the records by slot

The slots are all the memory there is, decided before anything is read. What is expected or held stays; the others go
by v = a + lambda f (`scheduler.neurons.worth`). A read that failed surfaces in the hold that waits for it, naming the
file; the next hold tries again. Holds by one thread, one of a layer at a time.
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
from scheduler.demand.records.table import I32
from scheduler.demand.workers import LoadWorkers
from scheduler.storage.disk import Disk
from scheduler.window.stats import ReadClock
from tpi.devices.pages import Bytes
from tpi.errors import PlanError, TpiError
from tpi.progress import Progress, silent
from tpi.trace import OFF, NoTrace

_LOOK_AGAIN = 1.0  # seconds after which a hold that waits asks whether its reads will come at all


class RecordTier:
    """The tier of one node. Closed before its memory goes."""

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
        """Of all `layers`, without slots so far; `workers` are so many `readers`.

        `gap` is how many bytes are sooner read along than not (`scheduler.demand.records.reads.measured_gap`); reads
        are of `least` bytes at least, but for those at a layer's end. `reads` is another reader's of the same disk.
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
        """Have the slots of all layers, one layer after the other, in `memory`; there is nothing in them.

        Raises:
            PlanError: if it does not hold them.
        """
        if memory.size < sum(each.layer.nbytes for each in self.layers):
            raise PlanError(f"{memory.size} bytes do not hold {len(self.layers)} layers' slots; give more --memory")
        at = 0
        with self._lock:
            for each in self.layers:
                each.lay(memory[at : at + each.layer.nbytes])
                at += each.layer.nbytes

    def rest(self) -> None:
        """Give the slots back, when nothing is read any more; nothing may be held. What is known of neurons stays."""
        self.abandon()
        with self._lock:
            while any(each.table.filling.any() for each in self.layers) and not self._closed:
                self._done.wait(_LOOK_AGAIN)
            for each in self.layers:
                each.lay(None)

    def fill(self, progress: Progress = silent) -> None:
        """Read what is active most often into all slots; it is not counted. Errors as `hold`."""
        counted = self.stats()
        for done, each in enumerate(self.layers, 1):
            with self._held(done - 1, each.hottest()):
                progress(done, len(self.layers))
        with self._lock:
            self._stats = counted

    def expect(self, layer: int, neurons: I32) -> None:
        """The next hold of `layer` is said to want `neurons`, in order; what there is no room for is not read."""
        each = self.layers[layer]
        with self._lock:
            each.release_expected()
            if self._closed or len(neurons) > len(each.table):
                return
            if self._request(layer, neurons, self._ahead):
                each.expected = neurons

    @contextmanager
    def hold(self, layer: int, neurons: I32) -> Iterator[I32]:
        """The slots of `neurons` (int32, each once, in order) when all are there; they stay until the end.

        Raises:
            WeightsError: if one could not be read; names the file. Or what else a read failed with.
            TpiError: if they are more than the layer has slots for, or the tier is closed.
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
                each.table.unpin(neurons)
                raise
        try:
            yield slots
        finally:
            with self._lock:
                each.table.unpin(neurons)

    def begin(self) -> None:
        """A step begins that reads by neurons."""
        with self._lock:
            self._stats.tokens += 1

    def abandon(self) -> None:
        """Nothing that is expected will be held."""
        with self._lock:
            for each in self.layers:
                each.release_expected()

    def stats(self) -> RecordStats:
        """The counts so far."""
        with self._lock:
            self._stats.along = sum(each.along for each in self.layers)
            return self._stats.copy()

    def close(self) -> None:
        """Begin no more reads; return when those under way are over. Idempotent."""
        with self._lock:
            self._closed = True
            self._done.notify_all()
        self._workers.close()

    # under the lock

    def _require_open(self) -> None:
        if self._closed or self._workers.lost:
            raise TpiError("the neurons' records are closed; nothing can be held any more")

    def _pin(self, layer: int, neurons: I32) -> None:
        """Pin what is held now, in place of what was expected, and have what lacks read before all else."""
        each = self.layers[layer]
        if each.expected is not None and each.expected is not neurons:
            each.release_expected()
        if each.expected is None:
            while not self._request(layer, neurons, self._demanded):
                if not each.table.settling:
                    raise PlanError(
                        f"{len(neurons)} neurons of {each.layer.name} cannot be held at once: there is room for "
                        f"{len(each.table)}; give more --memory"
                    )
                self._done.wait(_LOOK_AGAIN)
        each.expected = None
        self._demanded.extend(job for job in self._ahead if job.layer == layer)
        self._ahead = deque(job for job in self._ahead if job.layer != layer)

    def _request(self, layer: int, neurons: I32, queue: "deque[_Job]") -> bool:
        """Pin `neurons` and queue the reads of what lacks; whether there was room."""
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
        """The slots of pinned neurons when nothing of them is on its way."""
        each, began = self.layers[layer], 0.0
        slots: I32 = each.table.slot_of[neurons]
        while each.table.filling[slots].any():
            began = began or time.perf_counter()
            self._require_open()
            self._done.wait(_LOOK_AGAIN)
        if began:
            ended = time.perf_counter()
            self._stats.stall_seconds += ended - began
            self._trace.add("stall", each.layer.name, int(began * 1e9), int(ended * 1e9))
        if each.table.broken[slots].any():
            assert each.error is not None
            raise each.error
        return slots

    # the readers' side

    def _serve(self) -> None:
        """One job of the most urgent, if there is any."""
        with self._lock:
            queue = self._demanded or self._ahead
            if self._closed or not queue:
                return
            job = queue.popleft()
        began, moved, error = time.perf_counter(), 0, None
        self._reads.fly()
        try:
            moved = self._reader.read(self.layers[job.layer], job.read)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it surfaces where the records are awaited
            error = failure
        self._reads.land()
        self._trace.add("load", self.layers[job.layer].layer.name, int(began * 1e9), int(time.perf_counter() * 1e9))
        with self._lock:
            self._finish(job, moved, error)

    def _finish(self, job: "_Job", moved: int, error: Exception | None) -> None:
        each = self.layers[job.layer]
        self._stats.reads += len(job.read.ranges)
        self._stats.read_bytes += moved
        if error is None:
            each.table.arrived(job.read.slots)
        else:
            each.error = error
            each.table.failed(job.read.slots)
        self._done.notify_all()


class _Job:
    """Reads of one layer."""

    __slots__ = ("layer", "read")

    def __init__(self, layer: int, read: RecordRead) -> None:
        self.layer, self.read = layer, read
